"""Fuzzes what reads topics with odd records: none of them may end it, and each of them is accounted for.

    python -m tests.fuzz.records [--executions 100000] [--seed N]

Records have odd keys, values, headers and timestamps, in every format. They go through flows, on both paths, which must
agree; through a republisher, with its retry topic; and through a copy. Every record is folded, dropped and counted, or
a dead letter with its coordinates and a reason.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast
from unittest.mock import patch

import polars as pl

from aggregations.definition.aggregates import count, last, maximum, mean, minimum, total
from aggregations.definition.aggregates_exact import collect, histogram, variance
from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles, top
from aggregations.definition.element import Element, Record
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.payloads import Protobuf
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Raw, Topic
from aggregations.definition.windows import hopping, tumbling
from aggregations.engine.job import Job
from envelope import EnvelopeError, Reason, Tombstones, decode
from envelope.codec import parse
from envelope.deadletter import DeadLetterHeaders, size_of
from envelope.filters import (
    EventIdFilter,
    ProducerFilter,
    Scope,
    SequenceFilter,
    SessionWindows,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
    from_envelope,
    from_header,
    from_value,
)
from jobs.copying import TopicRecords
from jobs.copying.source import Read, Task
from jobs.republish import InputRecord, InputTopics, OutputRecord, Processor, Transform, identity
from jobs.republish.counts import Statistics
from jobs.republish.filtering import RecordFilter
from jobs.republish.input import Input
from jobs.republish.partition import InputPartition
from jobs.republish.retry import RetryTopics
from jobs.republish.source import JsonPayload, Wrapping
from jobs.republish.worker import Worker
from persistence.kafka import AcknowledgedProducer, KafkaSettings
from persistence.kafka.array_producer import texts_of
from tests.fuzz.odd import COLUMNS, TOPIC, Odd
from tests.messages import Every, Leg
from tests.property.test_republish import Delivered
from tests.support.both import Both
from tests.support.jobs import job_of
from tests.support.pure import fresh_store

LARGEST: Final = 3_000
"""Bytes that the topics of outputs and of dead letters take."""


class Longest:
    """A fold in plain Python that fails for some elements, and a result that fails for some states."""

    def zero(self) -> dict[str, Any]:
        return {"n": 0, "text": ""}

    def fold(self, state: dict[str, Any], element: Element[Any]) -> dict[str, Any]:
        text = str(element["t"] or "")
        return {"n": state["n"] + len(text[:9]) // (element["n"] or 1), "text": max(state["text"], text, key=len)}

    def result(self, state: dict[str, Any]) -> Any:
        return {**state, "odd": 1 // (state["n"] % 7)}


BARE: Final = Topic(TOPIC, Json(COLUMNS), envelope=False)
ENVELOPED: Final = Topic(TOPIC, Json(COLUMNS))
EVERY: Final = Fields(
    n=count(), total=total("n"), low=minimum("f"), high=maximum("n"), mean=mean("f"), last=last("t"), kept=collect("t", 5),
    spread=variance("f"), ids=approximate_distinct("id"), parts=quantiles("n", [0.0, 0.5, 1.0]), most=top("k", 3),
    bars=histogram("f", [0.0, 1.0]),
)  # fmt: skip


def _flows() -> dict[str, Flow[Any]]:
    def source(topic: Topic) -> Flow[Any]:
        return Flow("f").source(topic)

    ahead = Topic(TOPIC, Json(COLUMNS), envelope=False, time="at", ahead="3650d")
    columns = (
        source(BARE)
        .filter(pl.col("n") != 3)
        .map(m=pl.col("n") * 2 + pl.col("l").list.len(), q=pl.col("f") / pl.col("n"))
    )
    return {
        "fields": columns.publish("out").aggregate("s", key="k", fold=EVERY).publish_states("states"),
        "envelopes": source(ENVELOPED).aggregate("s", key="_key", fold=EVERY).publish("out", key="k"),
        "function": source(BARE).map(lambda e: {**e.value, "x": e["n"] + 1}).aggregate("s", key="k", fold=Longest()).publish_states("states"),
        "raw": source(Topic(TOPIC, Raw(), envelope=False)).aggregate("s", key="_key", fold=Fields(n=count())).publish("out", value=lambda e: e["value"]),
        "raw envelopes": source(Topic(TOPIC, Raw())).aggregate("s", key=lambda e: e.event_id, fold=Fields(n=count())),
        "protobuf": source(Topic(TOPIC, Leg, envelope=False)).aggregate("s", key="tail", fold=Fields(n=count(), m=total("minutes"), d=maximum("delay"))),
        "protobuf envelopes": source(Topic(TOPIC, Leg)).aggregate("s", key="tail", fold=Fields(n=count(), m=total("minutes"), d=total("delay"))),
        "every type": source(Topic(TOPIC, Every, envelope=False)).aggregate("s", key="string", fold=Fields(n=count(), d=total("double"))),
        "windows": source(ahead).aggregate("s", key="k", fold=Fields(n=count(), m=total("n")), window=tumbling("10s", late="dead_letter")).publish_states("states"),
        "hopping": source(BARE).aggregate("s", key="k", fold=Fields(n=count(), m=total("n")), window=hopping("10s", "5s")),
        "sessions": source(ahead).aggregate("s", key="k", fold=Fields(n=count(), m=mean("f")), window=session("3s")).publish_states("states", on="close"),
        "expiring": source(ENVELOPED).aggregate("s", key="k", fold=Fields(n=count()), expire_after="1h", emit=Emit(n="n")).publish("out"),
        "two stages": source(BARE).aggregate("s", key="k", fold=Fields(n=count())).flat_map("l").aggregate("t", key=pl.col("l"), fold=Fields(n=count(), m=total("l"))),
        "tombstones": source(Topic(TOPIC, Json(COLUMNS), envelope=False, tombstones=Tombstones.ELEMENT)).aggregate("s", key="_key", fold=Fields(n=count())),
        "sequence": source(BARE).deduplicate(SequenceFilter(from_value("n"), scope_by=Scope.KEY)).publish("out"),
        "header": source(ENVELOPED).deduplicate(SequenceFilter(from_header("seq"))).publish("out"),
        "ids": source(ENVELOPED).deduplicate(EventIdFilter(from_envelope("event_id"), timedelta(days=1))).publish("out"),
        "producers": source(ENVELOPED).deduplicate(ProducerFilter()).publish("out"),
        "interval": source(BARE).deduplicate(deduplicate(from_value("id"), timedelta(seconds=2), partitions=3)).publish("out"),
        "interval by key": source(BARE).deduplicate(deduplicate_by_key(timedelta(seconds=2))).publish("out"),
        "distinct": source(BARE).deduplicate(distinct(SessionWindows(timedelta(seconds=5)))).publish("out"),
        "no stage": source(ENVELOPED).filter(pl.col("n") > 0).publish("out", key="k"),
    }  # fmt: skip


FLOWS: Final = _flows()


def fold(flow: Flow[Any], odd: Odd, records: int) -> Counter[str]:
    """Fold odd records on both paths."""
    both, outcomes = Both(flow, largest={"out": LARGEST, "states": LARGEST}), Counter[str]()
    for first in range(0, records, 25):
        given = [odd.record(offset) for offset in range(first, min(first + 25, records))]
        before = len(both.dead_letters)
        with patch("tests.support.both.job_of", partial(_job_of, _roots(given))):
            both.process(given)
        dead = both.dead_letters[before:]
        assert {one.record.node for one in dead} <= {one.node for one in given}
        outcomes.update(f"dead letter, {one.reason.value}" for one in dead)
        outcomes["read"] += len(given)
    report = both.memory.report
    judged = report.verdicts.get(flow.stage_names[0], Counter[str]())
    assert report.records == records
    assert report.reasons.total() == len(both.dead_letters)
    for one in both.dead_letters:
        assert one.reason is not None
        assert one.detail
    if flow.stages and not (first_stage := flow.stages[0]).fans_out:
        alone = [one for one in both.dead_letters if one.stage in ("", first_stage.name) and not one.hole]
        judged_too = sum(one.reason in (Reason.WINDOW_CLOSED, Reason.UNPROVEN) for one in alone)
        judged_too += judged["rejected"] if first_stage.aggregate.rule else 0
        assert report.records == report.tombstones + report.filtered + judged.total() + len(alone) - judged_too
    outcomes.update({f"verdict, {one}": number for one, number in judged.items()})
    return outcomes


def _job_of(roots: tuple[str, ...], *given: Any, **more: Any) -> Job:
    """A batch for which the broker was asked for all roots: there is none to be asked later."""
    return job_of(*given, **more | {"asked": (*more["asked"], *roots)})


def _roots(records: Iterable[Record]) -> tuple[str, ...]:
    found = set[str]()
    for one in records:
        with suppress(EnvelopeError):
            found.update(hop.topic for hop in decode(one.value).chain)
    return tuple(found)


class Sent:
    """What a republisher and its copy send, in place of a broker."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes | None, bytes | None, Any]] = []

    def send(self, topic: str, value: bytes | None, key: bytes | None = None, headers: Any = ()) -> None:
        self.records.append((topic, value, key, headers))

    def send_many(self, topic: str, many: Sequence[Any]) -> None:
        for one in many:
            self.send(topic, one["value"], one.get("key"), one.get("headers", ()))

    def send_arrays(self, topic: str, values: Any, keys: Any) -> None:
        for value, key in zip(texts_of(values), texts_of(keys), strict=True):
            self.send(topic, value, key)

    def flush(self, timeout: float | None = None) -> None:
        """Everything has arrived."""

    def check(self, sizes: dict[str, int]) -> Counter[str]:
        """Check that each record fits into its topic and can be read there; count the records by topic."""
        for topic, value, key, headers in self.records:
            assert size_of(key, value, headers) <= sizes[topic], (topic, len(value or b""))
            if topic == "dead":
                letter = DeadLetterHeaders.read(headers)
                assert letter is not None
                assert letter.topic in ("legs", "retry")
                assert letter.reason is not None
            else:
                parse(value or b"")
        return Counter(topic for topic, *_ in self.records)


def cut(record: InputRecord) -> Any:
    """A transform that fails for some records, drops some, and makes several of others."""
    match len(record.payload) % 7:
        case 0:
            raise LookupError(str(record.data))
        case 1:
            return None
        case 2:
            return [OutputRecord(key=b"a"), OutputRecord(payload=b"x" * 5000)]
        case 3:
            return [OutputRecord(key=None), 7]
    return OutputRecord(key=record.payload[:3], event_id=record.event_id)


SOURCES: Final[dict[str, tuple[InputTopics, Transform, dict[str, Any]]]] = {
    "forwarding": (InputTopics((TOPIC,)), identity, {}),
    "mirroring": (InputTopics((TOPIC,)), identity, {"headers_mirror": True}),
    "envelopes of JSON": (InputTopics((TOPIC,), payload=JsonPayload), cut, {}),
    "envelopes of protobuf": (InputTopics((TOPIC,), payload=Leg, tombstones=Tombstones.DEAD_LETTER), cut, {"headers_mirror": True}),
    "raw": (InputTopics((TOPIC,), Wrapping.NONE, event_id="coordinates"), identity, {"mark_destination": True}),
    "JSON": (InputTopics((TOPIC,), Wrapping.NONE, JsonPayload, event_id="hash:k,n"), cut, {}),
    "JSON with ids": (InputTopics((TOPIC,), Wrapping.NONE, JsonPayload, event_id="field:id"), identity, {"headers_mirror": True}),
    "protobuf": (InputTopics((TOPIC,), Wrapping.NONE, Leg, event_id="field:tail"), cut, {}),
    "CloudEvents": (InputTopics((TOPIC,), Wrapping.CLOUDEVENTS), identity, {"headers_mirror": True}),
}  # fmt: skip
RULES: Final[dict[str, Callable[[], Any]]] = {
    "envelopes of JSON": lambda: SequenceFilter(from_value("n")),
    "JSON": lambda: deduplicate_by_key_value(from_value("id"), timedelta(seconds=2)),
    "raw": lambda: SequenceFilter(from_header("seq")),
    "mirroring": lambda: ProducerFilter(),
}
SIZES: Final = {"out": LARGEST, "retry": LARGEST, "dead": LARGEST}


def republish(name: str, odd: Odd, records: int) -> Counter[str]:
    """Republish odd records, over a retry topic."""
    source, transform, options = SOURCES[name]
    parts = {(topic, 0): InputPartition(topic, 0, "r", "id", None, "") for topic in (TOPIC, "retry")}
    sent = Sent()
    judging = None
    if name in RULES:
        judging = RecordFilter(RULES[name](), fresh_store(), "g", lambda names: dict.fromkeys(names, "id"))
    gaps = SimpleNamespace(partitions=parts, check=lambda: None, jumped=lambda *_: None, hold=lambda *_: None)
    worker = Worker(
        name="r",
        processor=Processor(
            transform, via="r", source=source, targets={"out": LARGEST}, retry_topics={"retry": LARGEST}, **options
        ),
        source=cast(Input, gaps),
        producer=cast(AcknowledgedProducer, sent),
        retry=RetryTopics({"retry": 0}),
        dead_letter=("dead", LARGEST),
        cluster="",
        judging=judging,
    )
    given: list[Any] = []
    for offset in range(records):
        one = odd.record(offset)
        topic = "retry" if odd.rng.random() < 0.1 else TOPIC
        stamp = None if odd.rng.random() < 0.1 else one.timestamp_ms
        given.append(
            Delivered(
                InputRecord(
                    topic, 0, offset, one.key, one.value, list(one.headers), stamp, odd.rng.choice([None, 0, 5])
                )
            )
        )
    counts = Statistics()
    for first in range(0, records, 50):
        worker.handle(given[first : first + 50])
        worker.finish()
        counts.add(worker.take_counts())
    by_topic = sent.check(SIZES)
    assert counts.consumed == records
    assert by_topic["dead"] == counts.dead_lettered.total()
    assert by_topic["out"] == counts.produced
    assert by_topic["retry"] == counts.retried
    return Counter({f"sent to {topic}": number for topic, number in by_topic.items()}) + Counter({"read": records})


def copy(name: str, odd: Odd, records: int) -> Counter[str]:
    """Copy odd records."""
    source, _, _ = SOURCES[name]
    topics, read = TopicRecords(source), Read()
    topics._task = Task(
        "c", "out", LARGEST - 256, LARGEST, 0, until_caught_up=True, settings=KafkaSettings("nowhere:1")
    )
    topics._processor = Processor(identity, via="c", source=source, targets={"out": LARGEST})
    topics._ids = {TOPIC: "id"}
    topics._add(TOPIC, 0, 0)
    express = topics._processor.express()
    given: list[Any] = []
    for offset in range(records):
        one = odd.record(offset)
        given.append(
            Delivered(InputRecord(TOPIC, 0, offset, one.key, one.value, list(one.headers), one.timestamp_ms, 0))
        )
    values = express.each(given, topics._hops) if express else [None] * records
    for message, value in zip(given, values, strict=True):
        topics._take(message, value, read)
    counts, sent = read.counts, Sent()
    for made in read.outputs:
        sent.send("dead" if made.dead else "out", made.value, made.key, made.headers)
    by_topic = sent.check(SIZES)
    assert by_topic == Counter({"out": counts.written, "dead": counts.dead_lettered.total()})
    assert counts.read == records == counts.written + counts.dead_lettered.total() + counts.tombstones + counts.copies
    return Counter({f"sent to {topic}": number for topic, number in by_topic.items()}) + Counter({"read": records})


def _usual(topic: Topic) -> dict[str, bool]:
    return {"enveloped": topic.envelope, "protobuf": isinstance(topic.payload, Protobuf)}


def _usual_of(source: InputTopics) -> dict[str, bool]:
    return {"enveloped": source.wrapping is Wrapping.ENVELOPE, "protobuf": source.payload is Leg}


RUNS: Final[dict[str, tuple[Callable[[Odd, int], Counter[str]], dict[str, bool]]]] = {
    **{f"flow, {name}": (partial(fold, flow), _usual(flow.inputs[0].topic)) for name, flow in FLOWS.items()},
    **{f"republisher, {name}": (partial(republish, name), _usual_of(one[0])) for name, one in SOURCES.items()},
    **{f"copy, {name}": (partial(copy, name), _usual_of(one[0])) for name, one in SOURCES.items()},
}


def run(name: str, records: int, seed: int) -> Counter[str]:
    """Run one of `RUNS`.

    Raises:
        AssertionError: Something ended it, or a record is not accounted for; the text has the seed.
    """
    process, usual = RUNS[name]
    try:
        return process(Odd(random.Random(f"{seed} {name}"), **usual), records)
    except Exception as error:
        raise AssertionError(f"{name}, seed {seed}, {records} records") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--only", default="", help="part of a run's name")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    began, outcomes, seed = time.monotonic(), Counter[str](), arguments.seed
    while outcomes["read"] < arguments.executions:
        for name in RUNS:
            if arguments.only in name:
                outcomes += run(name, 100, seed)
        seed += 1
    for outcome, number in outcomes.most_common():
        print(f"{number:>10,}  {outcome}")
    print(f"{outcomes['read']:,} records in {time.monotonic() - began:.0f} s: none of them ended anything")


if __name__ == "__main__":
    main()

"""The in-memory runner against a plain fold: republished, re-keyed, fanned out, re-sent, cut anywhere, crashed anywhere."""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, decode, encode
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import StoreError
from tests.support.pure import fresh_store

POINTS = ["epoch", "fetch", "load", "fold", "publish", "persist", "manifest"]
SUMS = Fields(n=count(), s=total("x"))


class Crash(Exception):
    pass


def crash() -> NoReturn:
    raise Crash


@dataclass(frozen=True)
class Service:
    """A republisher: does it change the key, how many outputs has an input, how many partitions has its target."""

    changes: bool
    fan: int
    partitions: int


services = st.builds(Service, st.booleans(), st.integers(1, 3), st.integers(1, 3))
events = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 5)), max_size=8)
splits = st.lists(st.integers(1, 4), min_size=1, max_size=6)
crashes = st.lists(
    st.builds(Fault, st.sampled_from(POINTS), st.sampled_from(list(FaultOutcome)), st.integers(1, 4)), max_size=3
)


def place(key: str, partitions: int) -> int:
    return zlib.crc32(key.encode()) % partitions


def partitioned(topic: str, partitions: int, messages: Sequence[tuple[str, bytes]]) -> list[list[Record]]:
    logs: list[list[Record]] = [[] for _ in range(partitions)]
    for key, value in messages:
        log = logs[place(key, partitions)]
        log.append(Record(topic, place(key, partitions), len(log), key.encode(), value, topic_id=f"id-{topic}"))
    return logs


def outputs(record: Record, number: int, service: Service) -> Iterator[tuple[str, bytes]]:
    message = decode(record.value)
    payload = json.loads(message.payload)
    for index in range(service.fan):
        name = f"{payload['id']}.{index}"
        key = f"k{zlib.crc32(name.encode()) % 2}" if service.changes else payload["k"]
        hop = Hop(
            record.topic,
            record.partition,
            record.offset,
            via=f"s{number}",
            index=index,
            rekeyed=key.encode() != record.key,
            topic_id=record.topic_id,
        )
        made = json.dumps({**payload, "id": name, "k": key}).encode()
        yield key, encode(Envelope(made, chain=(*message.chain, hop)))


@st.composite
def courses(draw: st.DrawFn) -> tuple[str, list[list[Record]]]:
    """The content of a topic at the end of a chain of services that each read some of their input again."""
    messages = [
        (key, encode(Envelope(json.dumps({"id": f"e{n}", "k": key, "g": f"g{n % 2}", "x": x}).encode())))
        for n, (key, x) in enumerate(draw(events, label="events"))
    ]
    logs = partitioned("t0", draw(st.integers(1, 2), label="partitions"), messages)
    chain = draw(st.lists(services, max_size=3), label="services")
    for number, service in enumerate(chain):
        sent: list[tuple[str, bytes]] = []
        reads = [(log, offset) for log in logs for offset in range(len(log))]
        order = draw(st.permutations(range(len(logs))), label="order of partitions")
        for log in (logs[i] for i in order):
            offset = 0
            while offset < len(log):
                sent += outputs(log[offset], number, service)
                offset += 1
                if reads and draw(st.integers(0, 4), label="rewinds") == 0:
                    back = draw(st.integers(0, offset), label="to")
                    for again in range(back, offset):
                        sent += outputs(log[again], number, service)
        logs = partitioned(f"t{number + 1}", service.partitions, sent)
    return f"t{len(chain)}", logs


def flow(topic: str, *, stages: int, per_message: bool) -> Flow[Any]:
    key = (lambda element: element["k"]) if per_message else "k"
    made = Flow("f").source(Topic(topic, Json({"id": str, "k": str, "g": str, "x": int})))
    made = made.aggregate("first", key, SUMS)
    return made.aggregate("second", "g", SUMS) if stages == 2 else made


def unique(logs: Sequence[Sequence[Record]]) -> list[Mapping[str, Any]]:
    payloads = [json.loads(decode(record.value).payload) for log in logs for record in log]
    return list({payload["id"]: payload for payload in payloads}.values())


def plain(payloads: Sequence[Mapping[str, Any]], column: str) -> dict[bytes, dict[str, int]]:
    sums: dict[bytes, dict[str, int]] = defaultdict(lambda: {"n": 0, "s": 0})
    for payload in payloads:
        state = sums[payload[column].encode()]
        state["n"] += 1
        state["s"] += payload["x"]
    return dict(sums)


def run(
    of: Flow[Any], logs: Sequence[Sequence[Record]], sizes: Sequence[int], injected: Sequence[Fault] = ()
) -> tuple[MemoryRunner, int]:
    """Fold everything in batches of these sizes, beginning again with a new runner after every failure."""
    store, number, decided = fresh_store(), 0, 0
    with faults.use(Injector(injected, crash)):
        while True:
            try:
                runner = MemoryRunner(of, bind(of, {}, store))
                while True:
                    starts = [runner.run.start.get((of.topic.name, p), 0) for p in range(len(logs))]
                    size = sizes[number % len(sizes)]
                    batch = [one for log, start in zip(logs, starts, strict=True) for one in log[start : start + size]]
                    number += 1
                    if not batch:
                        return runner, decided
                    decided += sum(runner.process(batch).verdicts["first"].values())
            except (Crash, StoreError):
                continue


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(courses(), st.integers(1, 2), st.booleans(), splits, crashes)
def test_the_states_are_those_of_a_plain_fold_of_every_message_once(
    course: tuple[str, list[list[Record]]], stages: int, per_message: bool, sizes: list[int], injected: list[Fault]
) -> None:
    topic, logs = course
    runner, _ = run(flow(topic, stages=stages, per_message=per_message), logs, sizes, injected)
    assert runner.results("first") == plain(unique(logs), "k")
    if stages == 2:
        assert runner.results("second") == plain(unique(logs), "g")
    assert not runner.dead_letters


@given(courses(), splits, splits)
def test_it_does_not_matter_where_batches_end(
    course: tuple[str, list[list[Record]]], sizes: list[int], others: list[int]
) -> None:
    topic, logs = course
    of = flow(topic, stages=2, per_message=False)
    (one, decided), (other, _) = run(of, logs, sizes), run(of, logs, others)
    assert decided == sum(map(len, logs)), "every record has a verdict"
    for stage in ("first", "second"):
        mine, theirs = one.states(stage), other.states(stage)
        assert {key: state.fold for key, state in mine.items()} == {key: state.fold for key, state in theirs.items()}
        for key, state in mine.items():
            held = {lane: (history.held, history.floor) for lane, history in state.histories.lanes.items()}
            assert held == {
                lane: (history.held, history.floor) for lane, history in theirs[key].histories.lanes.items()
            }


@given(courses(), splits, crashes)
def test_what_is_not_folded_was_folded_before(
    course: tuple[str, list[list[Record]]], sizes: list[int], injected: list[Fault]
) -> None:
    """Every record is folded or a duplicate that its own course proves."""
    topic, logs = course
    of = flow(topic, stages=1, per_message=True)
    runner, _ = run(of, logs, sizes, injected)
    again = MemoryRunner(of, bind(of, {}, runner.run.urls["first"]))
    report = again.process([record for log in logs for record in log])
    folded = {"accepted", "late", "new_lane", "redriven"}
    assert not folded & set(report.verdicts["first"]), "all of it is held"
    assert sum(report.verdicts["first"].values()) == sum(map(len, logs))

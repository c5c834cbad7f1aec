"""A republisher with a filter, ended or overtaken at every step, on a simulated broker: the oracle is the filter alone."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import pytest

from envelope import Hop, decode
from envelope.deadletter import DeadLetterHeaders, own_headers
from envelope.filters import (
    Arrival,
    EventIdFilter,
    FilterStates,
    ProducerFilter,
    SequenceFilter,
    SessionWindows,
    Stamp,
    TimeWindows,
    deduplicate_by_key,
    distinct,
    from_value,
)
from jobs.dead_letters.redrive import Mend, redriven
from jobs.republish import PASS, InputRecord, InputTopics, JsonPayload, OutputRecord, Republisher, Wrapping
from jobs.republish.filtering import RecordFilter
from jobs.republish.worker import Worker
from persistence.commit.faults import use
from persistence.errors import Transient
from persistence.kafka import BrokerUnavailable
from tests.simulation.clients import simulated_clients
from tests.simulation.kafka import Cluster
from tests.simulation.life import Life, Sent
from tests.support.pure import fresh_store

T = TypeVar("T")

TIME = from_value("t")
TEN = timedelta(milliseconds=10)
FILTERS: dict[str, Any] = {
    "sequence": SequenceFilter(from_value("n")),
    "producer": ProducerFilter(lambda one: Stamp("p", one.value["n"], contiguous=True), time=TIME),
    "interval": deduplicate_by_key(TEN, time=TIME),
    "event id": EventIdFilter(from_value("id"), TEN, limit=3, time=TIME),
    "tumbling": distinct(TimeWindows(TEN, grace=TEN), time=TIME),
    "session": distinct(SessionWindows(timedelta(milliseconds=2), grace=TEN), time=TIME),
}
ENDS = ("before", "after", "error", "overtaken")
PARTITIONS = 2
Place = tuple[int, int]
"""Partition and offset."""


class Crash(Exception):
    pass


@dataclass
class At:
    """Ends the effect of this number, or lets another member of the group take over before it.

    Attributes:
        number: Its number among the effects of the republisher, from 1.
        end: How it ends.
        other: Runs the other member.
        reached: Effects so far.
    """

    number: int
    end: str
    other: Callable[[], None]
    reached: int = 0

    def effect(self, point: str, action: Callable[[], T]) -> T:
        kind = point.partition(":")[0]
        if kind not in ("republish", "filter"):
            return action()
        self.reached += 1
        if self.reached != self.number:
            return action()
        if self.end == "error":
            raise BrokerUnavailable("injected", "") if kind == "republish" else Transient("injected")
        if self.end == "overtaken":
            self.other()
            return action()
        if self.end == "after":
            action()
        raise Crash


def broker(seed: int) -> Cluster:
    """Messages of a producer that sends some of them again; one cannot be judged, and one cannot be transformed."""
    cluster, draw = Cluster(), random.Random(seed)
    for topic, partitions in (("in", PARTITIONS), ("out", 2), ("dead", 1)):
        cluster.create(topic, partitions)
    sent = [[0] for _ in range(PARTITIONS)]
    for n in range(14):
        place = draw.randrange(PARTITIONS)
        number = draw.choice([*sent[place][-3:], sent[place][-1] + 1, sent[place][-1] + 2])
        sent[place].append(max(number, sent[place][-1]))
        value = {"n": number, "id": f"e{draw.randrange(6)}", "t": max(0, n - draw.randrange(12)), "fails": n == 9}
        cluster.produce("in", draw.choice([b"a", b"b"]), json.dumps({} if n == 5 else value).encode(), partition=place)
    return cluster


def transform(record: InputRecord) -> OutputRecord:
    if record.data["fails"]:
        raise ValueError
    return PASS


def live(cluster: Cluster, rule: Any, store: str, limit: int) -> None:
    """Run the real republisher for up to `limit` records of each partition."""

    def deliver(sent: Sent) -> None:
        assert sent.value is not None
        cluster.produce(sent.topic, sent.key, sent.value, headers=sent.headers)

    life = Life(cluster, deliver, {("in", number): limit for number in range(PARTITIONS)})
    republisher = Republisher(
        transform,
        source=InputTopics(("in",), Wrapping.NONE, JsonPayload),
        target="out",
        name="r",
        settings=life,  # type: ignore[arg-type]
        dead_letter="dead",
        batch_size=3,
        deduplicate=rule,
        store=store,
    )
    life.stop = republisher.stop
    republisher.run()


def expected(cluster: Cluster, rule: Any) -> tuple[set[Place], set[Place]]:
    """Places of the records that reach the target, and the dead-letter topic, by the filter alone."""
    alone, out, dead = FilterStates(rule), set(), set()
    for one in cluster.topics["in"].records():
        value = json.loads(one.value or b"")
        ruling = alone.judge(Arrival("in", one.partition, one.offset, one.key, value, one.timestamp_ms))
        if ruling.verdict.diverts or (ruling.forward and value["fails"]):
            dead.add((one.partition, one.offset))
        elif ruling.forward:
            out.add((one.partition, one.offset))
    return out, dead


def found(cluster: Cluster) -> tuple[list[Place], set[Place]]:
    hops = [decode(one.value or b"").chain[0] for one in cluster.topics["out"].records()]
    letters = [dict(one.headers) for one in cluster.topics["dead"].records()]
    dead = {(int(one["hw-dlq-partition"] or 0), int(one["hw-dlq-offset"] or 0)) for one in letters}
    return [(hop.partition, hop.offset) for hop in hops], dead


def run(rule: Any, seed: int, number: int, end: str) -> tuple[Cluster, bool]:
    """A world whose republisher ends, or is overtaken, at one effect, and then reads on; whether it came that far."""
    cluster, store = broker(seed), fresh_store()

    def other() -> None:
        live(cluster, rule, store, 2)

    at = At(number, end, other)
    with simulated_clients():
        with use(at):
            try:
                live(cluster, rule, store, 6)
            except (Crash, BrokerUnavailable, Transient):
                pass
            happened = at.reached >= number
            at.number = -1
            live(cluster, rule, store, 100)
            live(cluster, rule, store, 100)
    return cluster, happened


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", FILTERS)
def test_an_end_at_any_step_loses_nothing_and_passes_on_no_duplicate(name: str, end: str) -> None:
    rule, seed = FILTERS[name], 0
    for number in count(1):
        seed += 1
        cluster, happened = run(rule, seed, number, end)
        got, dead = found(cluster)
        assert (set(got), dead) == expected(cluster, rule), (seed, number)
        if not happened:
            break
    assert number > 10


def test_without_an_end_every_record_is_passed_on_once() -> None:
    for name, rule in FILTERS.items():
        cluster, _ = run(rule, 1, -1, "before")
        got, _ = found(cluster)
        assert len(got) == len(set(got)), name


def redrive(cluster: Cluster, letter: Any, mend: Mend | None = None) -> None:
    """Send a dead letter back."""
    facts = DeadLetterHeaders.read(letter.headers)
    assert facts is not None
    place = Hop("dead", letter.partition, letter.offset)
    value = redriven(letter.key, letter.value, letter.headers, facts, place, mend)
    headers = own_headers(letter.headers)
    cluster.produce(facts.topic, letter.key, value, headers=headers, partition=facts.partition)


def values(*values: bytes) -> Cluster:
    """A broker with these values in one partition."""
    cluster = Cluster()
    for topic, partitions in (("in", PARTITIONS), ("out", 2), ("dead", 1)):
        cluster.create(topic, partitions)
    for value in values:
        cluster.produce("in", b"a", value, partition=0)
    return cluster


def event(name: str, *, fails: bool = False) -> bytes:
    return json.dumps({"id": name, "t": 1, "fails": fails}).encode()


def passed_on(cluster: Cluster) -> list[str]:
    """The ids of the records that reached the target."""
    return sorted(json.loads(decode(one.value or b"").payload)["id"] for one in cluster.topics["out"].records())


def test_a_record_that_never_reached_the_filter_is_judged_when_it_is_redriven() -> None:
    cluster, rule, store = values(b'{"id": "a"', event("a"), event("b")), FILTERS["event id"], fresh_store()
    with simulated_clients():
        live(cluster, rule, store, 10)
        [letter] = cluster.topics["dead"].records()
        assert dict(letter.headers)["hw-dlq-stage"] == b"event-id"
        redrive(cluster, letter, lambda key, value: event("a"))  # the filter has passed on a copy of it
        redrive(cluster, letter, lambda key, value: event("c"))
        live(cluster, rule, store, 10)
    assert passed_on(cluster) == ["a", "b", "c"]


@pytest.mark.parametrize("unread", [{4, 12}, {4}, {12}, {7, 15}, {0, 8}], ids=str)
@pytest.mark.parametrize("name", ["sequence", "producer"])
def test_of_two_records_with_one_number_one_is_passed_on_whichever_could_not_be_read(
    name: str, unread: set[int]
) -> None:
    """A producer sends 1 to 8, fails, and sends them again; the republisher is started again in between."""

    def record(place: int, *, readable: bool) -> bytes:
        value = json.dumps({"n": place % 8 + 1, "id": f"e{place % 8}", "t": 1, "fails": False}).encode()
        return value if readable else value[:-1]

    sent = [record(place, readable=place not in unread) for place in range(16)]
    cluster, store = values(*sent), fresh_store()
    with simulated_clients():
        for _ in range(4):
            live(cluster, FILTERS[name], store, 5)
        for letter in list(cluster.topics["dead"].records()):
            redrive(cluster, letter, lambda key, value: (value or b"") + b"}")
            live(cluster, FILTERS[name], store, 5)
    assert passed_on(cluster) == [f"e{n}" for n in range(8)]


def test_a_record_that_the_filter_passed_on_is_not_dropped_however_often_it_is_redriven() -> None:
    cluster, rule, store = values(event("a", fails=True), event("b")), FILTERS["event id"], fresh_store()
    mends: list[Mend | None] = [None, lambda key, value: b'{"id": "a"', lambda key, value: event("a")]
    with simulated_clients():
        live(cluster, rule, store, 10)
        for mend in mends:
            *_, letter = cluster.topics["dead"].records()
            assert "hw-dlq-stage" not in dict(letter.headers)
            redrive(cluster, letter, mend)
            live(cluster, rule, store, 10)
    assert passed_on(cluster) == ["a", "b"]


_FINISH: Any = Worker.finish
_JUDGE: Any = RecordFilter.judge


def _states_first(self: Any, timeout: float | None = None) -> None:
    self._filter.save(self._judged())
    _FINISH(self, timeout)


def _no_states(self: Any, parts: Any) -> None:
    pass


def _no_positions(self: Any, record: InputRecord) -> Any:
    self._judging[record.topic, record.partition].kept.positions.clear()
    return _JUDGE(self, record)


@pytest.mark.parametrize(
    ("owner", "method", "planted", "name"),
    [
        (Worker, "finish", _states_first, "sequence"),
        (RecordFilter, "save", _no_states, "sequence"),
        (RecordFilter, "judge", _no_positions, "interval"),
    ],
    ids=["states before outputs", "no states", "no positions"],
)
def test_a_planted_bug_is_found(
    owner: type, method: str, planted: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, planted)
    rule = FILTERS[name]
    for seed in range(60):
        cluster, _ = run(rule, seed, seed % 20 + 1, ENDS[seed % 2])
        got, dead = found(cluster)
        if (set(got), dead) != expected(cluster, rule):
            return
    pytest.fail("no world found it")

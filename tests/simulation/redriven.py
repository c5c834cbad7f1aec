"""A world whose code, or some of its records, are broken for a while: crashes everywhere, a fix, and a redrive.

Two stages, with `emit`, hopping windows, a lookup, a filter, steps. In the end it has what it would have if nothing had
ever been broken.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any, NamedTuple

import polars as pl

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Element, Record
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import hopping
from aggregations.per_message import dead_letters, judging, passing, stage
from aggregations.per_message.ledger import Entry, dead_entry
from aggregations.per_message.passing import passed_again
from aggregations.per_message.publishing import OutputMessage
from aggregations.report import DeadLetter
from aggregations.run import begin
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, Hop, decode, encode
from envelope.deadletter import DeadLetterHeaders, Form
from envelope.dedup.lineage import DIED
from envelope.filters import EventIdFilter, SequenceFilter, from_value
from envelope.filters.arrival import REDRIVEN, judge_late
from jobs.dead_letters.redrive import Mend, redriven
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Transient
from tests.simulation.faults import Crash, crash
from tests.simulation.oracle import Violation
from tests.simulation.patch import Patch
from tests.support.both import TOPIC_ID
from tests.support.pure import fresh_store

EVENTS = Topic("t", Json({"k": str, "m": str, "n": int, "fails": str, "at": int}), time="at")
TABLE = Topic("tab", Json({"c": str}), envelope=False)
UNREAD = "unread"
"""A record whose payload cannot be read until it is mended."""
PLACES = ("", "", "step", "two", "end")
"""Where a record fails while the code is broken; most do not."""
FILTERS: Mapping[str, Any] = {
    "": None,
    "ids": EventIdFilter(from_value("n"), timedelta(days=1)),
    "sequence": SequenceFilter(from_value("n")),
}
OUT: Flow[Any] = Flow("reader").source(Topic("out", Json({"k": str, "tier": int})))
SUMS: Any = Fields(n=count(), tier=total("tier"))
READERS = (OUT.aggregate("all", "k", SUMS, history=512), OUT.aggregate("all", "k", SUMS, history=1))
"""Flows that read the outputs. The second one remembers so little that it cannot always tell a late event from a copy."""
BROKEN = {"on": False}


class Event(NamedTuple):
    """What a producer or a republisher sends: `root` is its offset in the root topic."""

    root: int
    key: str
    seconds: int
    fails: str
    number: int


@contextmanager
def broken(on: bool = True) -> Iterator[None]:
    """The code is broken while the block runs."""
    BROKEN["on"] = on
    try:
        yield
    finally:
        BROKEN["on"] = False


def fail(element: Element[Any], place: str) -> None:
    if BROKEN["on"] and element["fails"] == place:
        raise ValueError(place)


def step(element: Element[Any]) -> Any:
    fail(element, "step")
    return element.value


def published(element: Element[Any]) -> bytes:
    fail(element, "end")
    return json.dumps({"k": element["k"], "tier": element["tier"]}).encode()


class Count:
    """Counts elements, and those of each tier."""

    def zero(self) -> Any:
        return {}

    def fold(self, state: Any, element: Element[Any]) -> Any:
        fail(element, "two")
        tier = str(element["tier"])
        return {**state, tier: state.get(tier, 0) + 1}


def tiers(element: Element[Any], state: Any) -> Iterator[dict[str, Any]]:
    """As many items as the state says: the third event of a key has none."""
    for n in range(state["n"] % 3):
        yield {**element.value, "tier": state["n"] + n}


def twice(element: Element[Any]) -> list[Any]:
    return [element.value, {**element.value, "tier": -2}]


def by_tier(element: Element[Any]) -> str:
    return str(element["tier"])


_COLUMNS: dict[str, Any] = {"k": "k", "m": "m", "fails": "fails", "tier": pl.col("new.n") + pl.col("old.n")}
EMITS: dict[str, Any] = {
    "the element": None,
    "columns": Emit(**_COLUMNS),
    "some columns": Emit(**_COLUMNS).when(pl.col("new.n") % 3 != 0),
    "a function": tiers,
}


@dataclass(frozen=True)
class Shape:
    """A flow of two stages.

    Attributes:
        emit: One of `EMITS`, of the first stage.
        filter: One of `FILTERS`.
        windows: Both stages have hopping windows.
        lookup: A lookup is between them, unless `emit` is a function.
        flat: A flat-map is between them.
        step: A step that fails is between them.
        tier: The second stage's key depends on the state of the first one.
        outputs: It publishes at its end.
        late: The windows of the first stage close late, too.
    """

    emit: str = "the element"
    filter: str = ""
    windows: bool = False
    lookup: bool = False
    flat: bool = False
    step: bool = False
    tier: bool = False
    outputs: bool = False
    late: bool = False

    def flow(self) -> Flow[Any]:
        """The flow."""
        emit = EMITS[self.emit]
        later: dict[str, Any] = {"window": hopping("10s", "5s", lateness="1d")} if self.windows else {}
        windows = {"window": hopping("10s", "5s")} if self.windows and not self.late else later
        flow: Flow[Any] = Flow("f").source(EVENTS)
        if self.filter:
            flow = flow.deduplicate(FILTERS[self.filter])
        flow = flow.aggregate("one", "k", Fields(n=count()), emit=emit, **windows)
        if emit is None:
            flow = flow.map(tier=pl.lit(-1))
        if self.lookup and emit is not tiers:
            flow = flow.lookup("tb", TABLE, key="m", columns=["c"])
        if self.flat:
            flow = flow.flat_map(twice)
        if self.step:
            flow = flow.map(step)
        flow = flow.aggregate("two", by_tier if self.tier else "k", Count(), **later)
        return flow.publish("out", value=published) if self.outputs else flow


def event(offset: int, root: int, key: str, seconds: int, fails: str, number: int = 0) -> Record:
    """A record of a republisher: the offset in its root topic says which message it is."""
    document: dict[str, Any] = {"k": key, "m": "x", "n": number, "fails": fails, "at": seconds * 1000}
    document = {**document, "k": 0, "key": key} if fails == UNREAD else document
    hop = Hop("raw", 0, root, via="rep", index=0, topic_id="R1")
    value = encode(Envelope(json.dumps(document).encode(), chain=(hop,), key=b"k"))
    return Record("t", 0, offset, b"k", value, seconds * 1000, topic_id=TOPIC_ID)


def mended(key: bytes | None, value: bytes | None) -> bytes:
    """The payload of a record whose payload can be read."""
    assert value is not None
    document = json.loads(decode(value).payload)
    return json.dumps({**document, "k": document.pop("key", document["k"])}).encode()


def back(flow: Flow[Any], dead: DeadLetter, offset: int, mend: Mend | None = None, *, asserted: bool = False) -> Record:
    """A dead letter as `headwater redrive` brings it back."""
    one = dead.record
    facts = DeadLetterHeaders(
        *(one.topic, one.partition, one.offset, dead.reason),
        topic_id=one.topic_id,
        stage=dead.stage,
        application=flow.name,
        hole=dead.hole,
        items=dead.items,
        form=Form.ENVELOPE if flow.source_of(one.topic).envelope else Form.PAYLOAD,
        timestamp_ms=one.timestamp_ms,
    )
    value = redriven(one.key, one.value, (), facts, Hop("dead", 0, offset, topic_id="D"), mend, asserted=asserted)
    return Record(one.topic, one.partition, offset, one.key, value, one.timestamp_ms, one.headers, one.topic_id)


def row() -> Record:
    """The row that every event finds."""
    return Record("tab", 0, 0, b"x", b'{"c": "A"}', 1, topic_id=TOPIC_ID)


_POINTS = ("load", "fold", "publish", "dead_letter", "ledger", "persist:one", "persist:two", "manifest")
_STEPS = 500
"""Steps after which dead letters come back for ever."""


class RedrivenWorld:
    """One world, drawn from a seed.

    Attributes:
        redriven: Dead letters that were brought back.
    """

    def __init__(self, seed: int) -> None:
        self._random = random = Random(f"redriven {seed}")
        emit, rule = random.choice(sorted(EMITS)), random.choice(sorted(FILTERS))
        # What is not read until later is folded later, and only some flows have the same results then.
        self._unread = EMITS[emit] is None
        windows, lookup, flat, fails, tier, outputs = (random.random() < 0.5 for _ in range(6))
        self._shape = Shape(emit, rule, windows, lookup, flat, fails, tier, outputs, self._unread)
        self._flow = self._shape.flow()
        self._events = self._drawn()
        self._log: list[Record] = []
        self._letters: list[DeadLetter] = []
        self._origins: dict[int, int] = {}
        self._outputs: list[OutputMessage] = []
        self.redriven = 0

    def _drawn(self) -> list[Event]:
        """Events, some of which the republisher sends again, or the producer if there is a filter."""
        random, found = self._random, list[Event]()
        places = (*PLACES, UNREAD, UNREAD) if self._unread else PLACES
        roots = numbers = 0
        for _ in range(random.randint(4, 16)):
            kind = random.random()
            if found and kind < 0.2:
                found.append(random.choice(found))
                continue
            if found and self._shape.filter and kind < 0.4:
                found.append(random.choice(found)._replace(root=roots))
            else:
                seconds = random.randint(1000, 1030)
                found.append(Event(roots, random.choice("AB"), seconds, random.choice(places), numbers))
                numbers += 1
            roots += 1
        return found

    def run(self) -> None:
        """Live through it.

        Raises:
            Violation: It does not have what it would have if nothing had been broken.
        """
        random, wanted = self._random, self._never()
        urls = {name: fresh_store() for name in self._flow.stage_names}
        runner, fixed, sent, brought, steps = self._start(urls), False, 0, 0, 0
        while not fixed or sent < len(self._events) or brought < len(self._letters) or self._left(runner):
            if (steps := steps + 1) > _STEPS:
                raise Violation(f"{self._shape}: dead letters come back for ever")
            fixed = fixed or random.random() < 0.15
            for one in self._events[sent : sent + random.randint(0, 4)]:
                self._log.append(event(len(self._log), *one))
                sent += 1
            for number in range(brought, random.randint(brought, len(self._letters)) if fixed else brought):
                at = random.randrange(number, len(self._letters))
                self._letters[number], self._letters[at] = self._letters[at], self._letters[number]
                self._bring(self._letters[number])
                brought += 1
            outcome = random.choice([None, None, *FaultOutcome])
            fault = [] if outcome is None else [Fault(random.choice(_POINTS), outcome, random.randint(1, 2))]
            before, batch = len(self._letters), self._left(runner)[: random.randint(0, 4)]
            try:
                with broken(not fixed), faults.use(Injector(fault, crash)):
                    self._process(runner, batch)
            except (Crash, Transient):
                runner = self._start(urls)
            if fixed and (
                more := [one.detail for one in self._letters[before:] if not self._may_be_rejected(one, batch)]
            ):
                raise Violation(f"{self._shape}: dead letters after the fix: {more}")
        for letter in self._letters[:1]:
            self._bring(letter)
            self._process(runner, self._left(runner))
        if (found := self._results(runner, self._outputs)) != wanted:
            raise Violation(f"{self._shape}: {found}, not {wanted}")
        if listed := self._listed(runner):
            raise Violation(f"{self._shape}: {listed} are still listed")

    def _may_be_rejected(self, letter: DeadLetter, batch: Sequence[Record]) -> bool:
        """Whether a record is rejected after the fix: it cannot be read, or is in one batch with what it stands for."""
        origin = self._origins.get(letter.record.offset)
        unread = json.loads(decode(letter.record.value).payload)["fails"] == UNREAD
        return unread or any(one.offset == origin for one in batch)

    def _listed(self, runner: MemoryRunner) -> list[Entry]:
        """What is listed although its dead letter was redriven.

        A crash may leave entries without a dead letter: before it is published, and again before the manifest of the batch
        that needs it no longer.
        """
        own = {one.record.offset for one in self._letters}
        roots = {one.offset for letter in self._letters for one in decode(letter.record.value).chain[:1]}
        return [
            Entry(name, group, position)
            for name, groups in runner.run.ledger.listed.items()
            for group, positions in groups.items()
            for position in positions
            if position[0] in (own if group.startswith(DIED) else roots)
        ]

    def _never(self) -> Any:
        """Results if nothing had ever been broken."""
        runner = self._start({name: fresh_store() for name in self._flow.stage_names})
        right = [one._replace(fails="") if one.fails == UNREAD else one for one in self._events]
        runner.process([event(offset, *one) for offset, one in enumerate(right)])
        return self._results(runner, runner.outputs)

    def _left(self, runner: MemoryRunner) -> list[Record]:
        return self._log[runner.run.positions("t").get(0, 0) :]

    def _bring(self, letter: DeadLetter) -> None:
        for _ in range(self._random.choice([1, 1, 1, 2])):
            self._origins[len(self._log)] = self._origins.get(letter.record.offset, letter.record.offset)
            self._log.append(back(self._flow, letter, len(self._log), mended))
            self.redriven += 1

    def _process(self, runner: MemoryRunner, batch: Sequence[Record]) -> None:
        letters, outputs = len(runner.dead_letters), len(runner.outputs)
        try:
            runner.process(batch)
        finally:
            self._letters += runner.dead_letters[letters:]
            self._outputs += runner.outputs[outputs:]

    def _start(self, urls: Mapping[str, str]) -> MemoryRunner:
        runner = MemoryRunner(self._flow, urls)
        for topic in self._flow.topics:
            runner.run.start_at(topic, TOPIC_ID, {0: 0} | runner.run.positions(topic))
        if len(self._flow.parts) > 1 and not runner.run.positions("tab").get(0):
            runner.process([row()])
        return runner

    def _results(self, runner: MemoryRunner, outputs: Sequence[OutputMessage]) -> Any:
        """Results of the stages, and of a flow that reads the outputs."""
        exact, short = (MemoryRunner(flow, {"all": fresh_store()}) for flow in READERS)
        for reader in (exact, short):
            for offset, one in enumerate(outputs):
                reader.process([Record("out", 0, offset, one.key, one.value, topic_id="O1")])
        if exact.dead_letters:
            raise Violation(f"{self._shape}: a reader has dead letters: {[one.detail for one in exact.dead_letters]}")
        many, known = (sum(one["n"] for one in reader.results("all").values()) for reader in (exact, short))
        if not known <= many <= known + len(short.dead_letters):
            raise Violation(f"{self._shape}: a reader with a short history lost or doubled {many - known} of {many}")
        return runner.results("one"), runner.results("two"), exact.results("all")


def _by_the_present_state(stage: Any, state: Any, kept: Any, arrival: Any, types: Any) -> Any:
    if arrival.sibling or stage.emit is None:
        return passed_again(stage, state, kept, arrival, types)
    return passing._made_now(stage, state, arrival, types)


def _of_the_whole_record(*arguments: Any, fixed: int = 0, **options: Any) -> Any:
    return dead_entry(*arguments, **options)


def _missing(rule: Any, state: Any, arrival: Any, *, asserted: bool = False) -> Any:
    ruling, state = judge_late(rule, state, arrival)
    return (ruling if ruling.forward else REDRIVEN), state


BUGS: Mapping[str, Patch] = {
    "emit gets the state as it is now": (stage, "passed_again", _by_the_present_state),
    "the state from before a record is not kept": (stage, "keeping", lambda *_: {}),
    "a dead letter stands for items that were not passed on": (dead_letters, "dead_entry", _of_the_whole_record),
    "a filter takes every dead letter for missing": (judging, "judge_late", _missing),
    "a filter does not note what it skips": (judging, "tracking", lambda rule, state, on: state),
}
"""Bugs that are planted on purpose."""

CRASH_BUGS: Mapping[str, Patch] = {
    "stores that a crash left ahead stay ahead": (begin, "_are_apart", lambda *_: False),
}
"""The same, of crashes."""

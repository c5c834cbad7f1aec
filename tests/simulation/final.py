"""A world of windows that are published when they close: partitions fall silent and return, and everything crashes.

A published window never changes, none is removed before it is published, and none is published again after the step that
published it is over. What a stage behind the windows counted is what the windows hold, or held when they were published.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.definition.windows import hopping, tumbling
from aggregations.report import Report
from aggregations.run import common
from aggregations.run.final import FinalSnapshots
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import Snapshot, read_snapshot
from envelope import TopicPartition
from tests.property.test_windows import SCREWS, Attempt, wanted
from tests.simulation.oracle import Violation
from tests.simulation.patch import Patch, original
from tests.simulation.windows import ACCEPT, WindowWorld
from tests.support.both import TOPIC_ID

_PAUSES = (0.0, 30.0, 400.0)


class FinalWorld(WindowWorld):
    """One world, drawn from a seed.

    Attributes:
        late: Number of elements that came too late for a window that others had closed.
    """

    windows = (*WindowWorld.windows, tumbling("5m"), hopping("10m", "5m", lateness="1m", retention="1h"))
    points = (*WindowWorld.points, "close", "close", "ledger")
    calm = 8

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._seconds = 0.0
        self._silent: int | None = None
        self._ends: dict[TopicPartition, int] = {}
        self._runners: list[MemoryRunner] = []
        self._read = 0
        self._final: dict[bytes, Snapshot] = {}
        self._met: set[bytes] = set()
        self.late = 0

    @property
    def published(self) -> int:
        """Number of windows that were published."""
        return len(self._final)

    def _source(self) -> Topic:
        return replace(SCREWS, idle="5m")

    def _published(self, attempts: Flow[Any]) -> Flow[Any]:
        return attempts.publish_states("final", on="close")

    def _start(self) -> MemoryRunner:
        ends, clock = dict(self._ends), lambda: self._seconds
        runner = MemoryRunner(self._flow, self._stores, accept=ACCEPT, ends=ends, clock=clock)
        self._runners.append(runner)
        starts = dict.fromkeys(range(len(self._log)), 0) | runner.run.positions("screws")
        runner.run.start_at("screws", TOPIC_ID, starts)
        return runner

    def _batch(self, runner: MemoryRunner, *, whole: bool) -> list[Any]:
        self._seconds += self._random.choice(_PAUSES)
        random = self._random
        if random.random() < 0.3:
            self._silent = random.choice([None, *range(len(self._log))])
        batch = [one for one in super()._batch(runner, whole=whole) if whole or one.partition != self._silent]
        for one in batch:
            place = TopicPartition("screws", one.partition)
            self._ends[place] = max(self._ends.get(place, 0), one.offset + 1)
        return batch

    def _check(self, runner: MemoryRunner, *, ended: bool) -> None:
        found = runner.results("attempts")
        self._met |= found.keys()
        self._check_published(found)
        closing_us = runner.run.manifest.closing_us if runner.run.manifest else None
        closed = None if closing_us is None else self._window.closed_until(closing_us)
        for key in self._met - self._final.keys():
            if key not in found:
                raise Violation(f"{key!r} has left and was not published")
            if closed is not None and self._window.due(key) <= closed:
                raise Violation(f"{key!r} has closed and was not published")
        if ended:
            self._check_counts(runner, found)

    def _check_published(self, found: Mapping[bytes, Any]) -> None:
        """Compare what was published since the last check with what is stored, and with what was published before."""
        outputs = [output for one in self._runners for output in one.outputs]
        sealed, self._read, new = set(self._final), len(outputs), outputs[self._read :]
        for output in new:
            assert output.key is not None
            snapshot = read_snapshot(output.value)
            if output.key in sealed:
                raise Violation(f"{output.key!r} was published again")
            known = self._final.setdefault(output.key, snapshot)
            if not self._unchanged(known, snapshot):
                raise Violation(f"{output.key!r} was published as {known.state}, then as {snapshot.state}")
        for key, snapshot in self._final.items():
            if key in found and found[key] != snapshot.state:
                raise Violation(f"{key!r} was published as {snapshot.state} and now holds {found[key]}")

    def _unchanged(self, known: Snapshot, repeated: Snapshot) -> bool:
        return (known.state, known.version) == (repeated.state, repeated.version)

    def _check_counts(self, runner: MemoryRunner, found: Mapping[bytes, Any]) -> None:
        """Compare the windows with the logs, and with what the stage behind them counted."""
        held: dict[bytes, set[Attempt]] = {}
        for log in self._log:
            held |= wanted(log, self._window)[0]
        counted: Counter[bytes] = Counter()
        for key in held:
            state = found.get(key) or (self._final[key].state if key in self._final else {"n": 0})
            if state["n"] > len(held[key]):
                raise Violation(f"{key!r} holds {state['n']} of {len(held[key])}")
            self.late += len(held[key]) - state["n"]
            counted[self._window.stage_key(key)] += state["n"]
        if {key: one["n"] for key, one in runner.results("all").items()} != {key: n for key, n in counted.items() if n}:
            raise Violation("an element was lost, or counted twice, behind a window")


def _frozen(self: Any, removed: Mapping[str, int]) -> dict[str, int]:
    """Judges by the watermark with which the run began."""
    first = self.__dict__.setdefault("first", _closed(self, {}))
    return dict(Counter(first) | Counter(removed))


_closed = original(FinalSnapshots, "closed")
_publish = original(FinalSnapshots, "_publish")
_publish_all = original(FinalSnapshots, "publish")


def _removes_first(self: Any, report: Any) -> None:
    """Removes what is due before it is published."""
    report.removed.update(self._retirement.remove())
    report.add(self._final.publish())


def _notes_first(self: Any, stage: Any, after: int | None, until: int, counts: Report) -> None:
    """Notes that windows are published, then publishes them."""
    run = self._run
    run.note(run.changed(published={**run.manifest.published, stage.name: until}))
    _publish(self, stage, after, until, counts)


def _first_page(self: Any, stage: Any, _after: int | None, until: int, counts: Report) -> None:
    """Publishes only windows that end where the last ones end."""
    _publish(self, stage, until - 1, until, counts)


def _forgets(self: Any) -> Report:
    """Notes nowhere how far windows are published."""
    counts: Report = _publish_all(self)
    if self._run.manifest is not None:
        self._run.note(self._run.changed(published={}))
    return counts


BUGS: Mapping[str, Sequence[Patch]] = {
    "published-windows-open": [(FinalSnapshots, "closed", lambda _self, removed: dict(removed))],
    "judged-by-an-old-watermark": [(FinalSnapshots, "closed", _frozen)],
    "removed-before-published": [(MemoryRunner, "_leave", _removes_first)],
    "noted-before-published": [(FinalSnapshots, "_publish", _notes_first)],
    "published-is-not-noted": [(FinalSnapshots, "publish", _forgets)],
    "a-restart-forgets-what-is-published": [(common, "_published", lambda _manifests: {})],
    "earlier-windows-are-skipped": [(FinalSnapshots, "_publish", _first_page)],
}
"""Bugs that are planted on purpose: the patches that make them."""

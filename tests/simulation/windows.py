"""A world of windows that close and leave: random batches, crashes at every effect, and a store that is set back.

A stage without windows is in one store, a stage with windows and the one that counts what it passes on are in another.
At every moment the windows in the store are those of the rule that are not due, and nothing was counted twice or lost.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.definition.windows import Window, hopping, tumbling
from aggregations.per_message import arrivals, stage
from aggregations.run import memory, states
from aggregations.run.closing import with_closing
from aggregations.run.memory import MemoryRunner
from aggregations.run.retire import Retirement
from envelope import TopicPartition
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Transient
from persistence.memory import MemoryStore
from tests.property.test_retire import expired
from tests.property.test_windows import SCREWS, Attempt, wanted
from tests.simulation.faults import Crash, crash
from tests.simulation.oracle import Violation
from tests.simulation.patch import Patch, original
from tests.simulation.stores import SimulatedStore, forget, open_store
from tests.support.both import TOPIC_ID

_WINDOWS = (
    tumbling("5m", retention="0s"),
    tumbling("5m", lateness="2m", retention="4m"),
    hopping("10m", "5m", retention="0s"),
)
_POINTS = ("load", "publish", "persist:all", "persist:attempts", "persist:seen", "manifest", "remove", "write")
ACCEPT = ("store-empty", "store-went-back")
_STEPS = 14


class WindowWorld:
    """One world, drawn from a seed.

    Attributes:
        windows: Windows that its stage may have.
        points: Fault points at which it crashes.
        calm: Steps without a fault for every four with one.
    """

    windows: Sequence[Window] = _WINDOWS
    points: Sequence[str] = _POINTS
    calm: int = 2

    def __init__(self, seed: int) -> None:
        self._random = random = Random(seed)
        self._window: Window = random.choice(self.windows)
        self._log = [_log(random, partition) for partition in range(random.randint(1, 3))]
        fields = Fields(n=count(), torque=total("torque"))
        source = Flow("fastening").source(self._source()).aggregate("seen", "part", fields, history=512)
        attempts = source.aggregate("attempts", "part", fields, history=512, **self._stage())
        self._flow = self._published(attempts).aggregate("all", "part", fields, history=512)
        up, down = f"simulated://windows-up-{seed}", f"simulated://windows-down-{seed}"
        self._stores = {"seen": up, "attempts": down, "all": down}
        self._gone: set[bytes] = set()

    def _source(self) -> Topic:
        return SCREWS

    def _stage(self) -> dict[str, Any]:
        return {"window": self._window}

    def _published(self, attempts: Flow[Any]) -> Flow[Any]:
        return attempts

    @property
    def removed(self) -> int:
        """Number of windows that left."""
        return len(self._gone)

    def run(self) -> None:
        """Live through it.

        Raises:
            Violation: What is stored is not what the rule says.
        """
        try:
            self._live()
        finally:
            for url in self._stores.values():
                forget(url)

    def _live(self) -> None:
        random, runner = self._random, self._start()
        copy = self._upstream.copy()
        for _ in range(_STEPS):
            if random.random() < 0.15:
                self._upstream.restore(copy)
                runner = self._start()
            elif random.random() < 0.2:
                copy = self._upstream.copy()
            outcome = random.choice([*[None] * self.calm, *FaultOutcome])
            fault = [] if outcome is None else [Fault(random.choice(self.points), outcome, random.randint(1, 4))]
            try:
                with faults.use(Injector(fault, crash)):
                    runner.process(self._batch(runner, whole=False))
            except (Crash, Transient):
                runner = self._start()
            self._check(runner, ended=False)
        while batch := self._batch(runner, whole=True):
            runner.process(batch)
        self._check(runner, ended=True)

    @property
    def _upstream(self) -> SimulatedStore:
        return open_store(self._stores["seen"])

    def _start(self) -> MemoryRunner:
        runner = MemoryRunner(self._flow, self._stores, accept=ACCEPT)
        starts = dict.fromkeys(range(len(self._log)), 0) | runner.run.positions("screws")
        runner.run.start_at("screws", TOPIC_ID, starts)
        return runner

    def _batch(self, runner: MemoryRunner, *, whole: bool) -> list[Any]:
        found = []
        for partition, log in enumerate(self._log):
            start = runner.run.start.get(TopicPartition("screws", partition), 0)
            end = len(log) if whole else min(start + self._random.randint(0, 4), len(log))
            found += [log[offset].record(offset) for offset in range(start, end)]
        return found

    def _check(self, runner: MemoryRunner, *, ended: bool) -> None:
        """Compare with the rule; until the end, windows may hold less than the whole log."""
        held: dict[bytes, set[Attempt]] = {}
        for log in self._log:
            held |= wanted(log, self._window)[0]
        closing_us = runner.run.manifest.closing_us if runner.run.manifest else None
        # A store that is set back lowers the watermark; what has left does not return.
        until = self._window.due_until(closing_us) if closing_us else None
        self._gone |= {key for key in held if until is not None and self._window.due(key) <= until}
        due, found = self._gone, runner.results("attempts")
        for key, state in found.items():
            events = held.get(key, set())
            if state["n"] > len(events) or (ended and state != _sums(events)):
                raise Violation(f"{key!r} holds {state}, not {_sums(events)}")
        if left := due & found.keys():
            raise Violation(f"{min(left)!r} has not left, or returned")
        counted: dict[bytes, list[Attempt]] = {}
        for key, events in held.items():
            counted.setdefault(self._window.stage_key(key), []).extend(events)
        for key, state in runner.results("all").items():
            if state["n"] > len(counted.get(key, ())):
                raise Violation(f"{key!r} counted {state['n']} of {len(counted.get(key, ()))}")
        if ended:
            if missing := held.keys() - found.keys() - due:
                raise Violation(f"{min(missing)!r} has left and is not due")
            if runner.results("all") != {key: _sums(events) for key, events in counted.items() if events}:
                raise Violation("an element was lost, or counted twice, behind a window")


class ExpiryWorld(WindowWorld):
    """The same with a stage whose states expire."""

    def _stage(self) -> dict[str, Any]:
        self._minutes = self._random.choice([2, 4, 9])
        return {"expire_after": f"{self._minutes}m"}

    def _check(self, runner: MemoryRunner, *, ended: bool) -> None:
        held: dict[bytes, tuple[set[Attempt], int]] = {}
        folded = 0
        for log in self._log:
            mine, verdicts = expired(log, self._minutes * 60)
            held, folded = held | mine, folded + verdicts["folded"]
        found, counted = runner.results("attempts"), sum(one["n"] for one in runner.results("all").values())
        if counted > folded or (ended and counted < folded):
            raise Violation(f"{counted} of {folded} elements were passed on")
        if not ended:
            return
        closing_us = runner.run.manifest.closing_us if runner.run.manifest else None
        expiry = self._flow.stage("attempts").aggregate.expiry
        for key, (events, latest) in held.items():
            due = closing_us is not None and expiry is not None and expiry.due(latest) <= expiry.due_until(closing_us)
            self._gone |= {key} if due else set()
            if found.get(key) != (None if due else _sums(events)):
                raise Violation(f"{key!r} holds {found.get(key)}; due: {due}; {_sums(events)}")


def _sums(events: Sequence[Attempt] | set[Attempt]) -> dict[str, int]:
    return {"n": len(events), "torque": sum(one.root for one in events)}


def _log(random: Random, partition: int) -> list[Attempt]:
    log: list[Attempt] = []
    for root in range(random.randint(4, 14)):
        log.append(Attempt(partition, root, 3 * root + random.randint(0, 12)))
        if random.random() < 0.3:
            log.append(random.choice(log))
    return log


def _removes_first(run: Any, manifest: Any, idle: Any) -> Any:
    """Removes by a manifest that no store has yet."""
    made, before = with_closing(run, manifest, idle), run.manifest
    run.manifest = made
    Retirement(run).remove()
    run.manifest = before
    return made


def _moves_first(run: Any, manifest: Any, idle: Any) -> Any:
    """Writes the watermark of a batch before the batch is persisted."""
    made = with_closing(run, manifest, idle)
    run.save_everywhere(run.changed(closing_us=made.closing_us, **run.ledger.fields()))
    return made


_remove_from = original(MemoryStore, "_remove_from")


def _unmarked(self: Any, stage: Any, *arguments: Any) -> int:
    """Removes states, and does not note up to which time."""
    gone: int = _remove_from(self, stage, *arguments)
    self._removed.pop(stage, None)
    return gone


def _blind(self: Any, buckets: Any) -> None:
    """Does not look how far an earlier run has removed."""


_enter = original(arrivals, "enter_windows")


def _open(applied: Any, keys: Any, window: Window, removed: int | None) -> Any:
    """Judges by the log alone."""
    return _enter(applied, keys, window)


BUGS: Mapping[str, Sequence[Patch]] = {
    "removed-before-the-manifest": [(memory, "with_closing", _removes_first)],
    "watermark-of-a-crashed-batch": [(memory, "with_closing", _moves_first)],
    "removal-leaves-no-mark": [(MemoryStore, "_remove_from", _unmarked)],
    "marks-of-removals-not-read": [(Retirement, "learn", _blind)],
    "removed-windows-open": [(arrivals, "enter_windows", _open)],
    "states-without-a-due-time": [(states, "with_dues", lambda _stage, writes: writes)],
}
"""Bugs that are planted on purpose: the patches that make them."""

_expiring = original(arrivals, "enter_expiring")

EXPIRY_BUGS: Mapping[str, Sequence[Patch]] = {
    "expired-states-continue": [(stage, "has_expired", lambda *_: False)],
    "late-events-begin-states": [
        (arrivals, "enter_expiring", lambda *given: [one._replace(closed=False) for one in _expiring(*given)])
    ],
}
"""The same for states that expire."""

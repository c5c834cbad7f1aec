"""Named points at which every external effect can be made to fail, in tests and in the demo.

An effect that leaves the process (a produce, a write, an offset commit) runs as
`effect(point, action)`. Normally that only calls the action. With the environment variable
`HEADWATER_FAULT`, or inside `use(...)`, the effect has one of four outcomes:

| outcome | the effect | then |
|---|---|---|
| `before` | is not applied | the process dies |
| `after` | is applied | the process dies |
| `error` | is not applied | `Transient` is raised |
| `unanswered` | is applied | `Transient` is raised, as if the answer was lost |

`HEADWATER_FAULT=persist:carrier.after@2,publish.error` kills the process when the states of stage
`carrier` have been written for the second time, and fails the first publish. A point without a name
(`persist`) matches every point of its kind. "The process dies" means SIGKILL to the process in
`HEADWATER_FAULT_PID` (for workers the engine sets it to the driver) and to the process itself.
"""

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Protocol, Self, TypeVar

from persistence.commit.steps import CommitStep
from persistence.described import Described
from persistence.errors import Transient

T = TypeVar("T")

SPEC = "HEADWATER_FAULT"
PID = "HEADWATER_FAULT_PID"

EPOCH = "epoch"
FENCE = "fence"
DEAD_LETTER = "dead_letter"
LEDGER = "ledger"
FINISH = "finish"
STREAM_PLAN = "stream:plan"
STREAM_BEGIN = "stream:begin"
JOURNAL = "journal"
SNAPSHOT = "snapshot"
RESTORE = "restore"
POINTER = "pointer"
HELD = "held"
MEND = "mend"
DROP = "drop"
REPUBLISH_PRODUCE = "republish:produce"
REPUBLISH_FLUSH = "republish:flush"
REPUBLISH_DEAD_LETTER = "republish:dead_letter"
REPUBLISH_COMMIT = "republish:commit"
REPUBLISH_NOTE = "republish:note"
FILTER_CLAIM = "filter:claim"
FILTER_SAVE = "filter:save"
SESSION_SEND = "session:send"
SESSION_FLUSH = "session:flush"
WRITER_PRODUCE = "writer:produce"
WRITER_COMMIT = "writer:commit"
WRITER_SNAPSHOT = "writer:snapshot"
COPY_PRODUCE = "copy:produce"
COPY_POSITION = "copy:position"
COPY_COMMIT = "copy:commit"
REDRIVE_PRODUCE = "redrive:produce"
REDRIVE_FLUSH = "redrive:flush"


def write_of(stage: str) -> str:
    """The point at which a store writes a part of a stage's states."""
    return f"write:{stage}"


def removal_of(stage: str) -> str:
    """The point at which states that are due leave a stage's store."""
    return f"remove:{stage}"


def close_of(stage: str) -> str:
    """The point at which states of windows that have closed are published."""
    return f"close:{stage}"


_POINTS = {
    EPOCH: "a run's epoch is acquired or installed",
    FENCE: "one bucket of a store is closed to older epochs, within epoch",
    CommitStep.FETCH: CommitStep.FETCH.text,
    CommitStep.LOAD.of("STAGE"): CommitStep.LOAD.text,
    CommitStep.FOLD: CommitStep.FOLD.text,
    CommitStep.PUBLISH: CommitStep.PUBLISH.text,
    DEAD_LETTER: "dead letters of a flow are produced and acknowledged, within publish",
    LEDGER: "dead letters without a hole, added partitions, or the ends of a batch that has to be finished, are noted in "
    "the manifests, before anything is persisted; or how far closed windows are published",
    CommitStep.PERSIST.of("STAGE"): CommitStep.PERSIST.text,
    write_of("STAGE"): "a part of a stage's states is written by one transaction or script, within persist",
    CommitStep.MANIFEST.of("STORE"): CommitStep.MANIFEST.text,
    close_of("STAGE"): "states of a stage's closed windows are produced and acknowledged, after the manifests",
    removal_of("STAGE"): "states of a stage that are due are removed, after the manifests; or a table begins anew",
    CommitStep.RETURN: CommitStep.RETURN.text,
    CommitStep.OFFSETS: CommitStep.OFFSETS.text,
    STREAM_PLAN: "Spark is told where its next micro-batch ends; it has logged that the last one is committed, and logs this one",
    STREAM_BEGIN: "Spark is told what a micro-batch reads that it has logged",
    JOURNAL: "what a batch read and dropped is sent to the journal, or acknowledged; advisory, for `headwater explain`",
    SNAPSHOT: "the file of a snapshot, which is complete, gets its name; or a part of a snapshot is written to a store",
    RESTORE: "a restore writes a part of a snapshot: the note that it has begun, states, the manifest",
    POINTER: "the pointer to a flow's live generation is closed to older writers, or written into one store",
    HELD: "what a rebuild held until the swap, and published states, are produced and acknowledged, or what was held is removed",
    MEND: "a mend publishes states, writes them, or writes a manifest",
    DROP: "a part of a generation leaves a store: some of its states, or its epoch",
    FINISH: "a run that ends cleanly notes this in the manifests",
    REPUBLISH_PRODUCE: "a republisher hands a batch of outputs to its producer",
    REPUBLISH_FLUSH: "a republisher waits until its outputs are acknowledged",
    REPUBLISH_DEAD_LETTER: "a republisher's dead letters are produced and acknowledged",
    REPUBLISH_COMMIT: "a republisher commits its input offsets",
    REPUBLISH_NOTE: "a republisher commits the notes of its partitions, without a batch",
    FILTER_CLAIM: "a republisher takes over the filter states of partitions that it was assigned",
    FILTER_SAVE: "a republisher writes its filter states, after its outputs are acknowledged and before it commits",
    SESSION_SEND: "a producer session hands a message to its producer",
    SESSION_FLUSH: "a producer session waits until its messages are acknowledged, or commits their transaction",
    WRITER_PRODUCE: "a deduplicating writer hands a batch of new messages to its producer, within a transaction",
    WRITER_COMMIT: "a deduplicating writer commits the transaction",
    WRITER_SNAPSHOT: "a deduplicating writer stores a snapshot of a partition's sequence map",
    COPY_PRODUCE: "a copy hands a batch of messages to its producer, within a transaction",
    COPY_POSITION: "a copy hands its new position to its producer, in the same transaction",
    COPY_COMMIT: "a copy commits the transaction",
    REDRIVE_PRODUCE: "a redriven dead letter is handed to the producer",
    REDRIVE_FLUSH: "redriven dead letters are acknowledged",
}


def known_points() -> Mapping[str, str]:
    """Every point with its description; STAGE and STORE stand for a name."""
    return _POINTS


class FaultOutcome(Described):
    """How an effect ends at a fault."""

    BEFORE = "before", "not applied; the process dies"
    AFTER = "after", "applied; the process dies"
    ERROR = "error", "not applied; the caller gets an error"
    UNANSWERED = "unanswered", "applied; the caller gets an error, as if the answer was lost"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: the `nth` time that this process reaches `point` ends in `outcome`."""

    point: str
    outcome: FaultOutcome
    nth: int = 1

    def __post_init__(self) -> None:
        if not _is_known(self.point):
            raise ValueError(f"unknown fault point {self.point!r}; use one of {', '.join(_POINTS)}")
        if self.nth < 1:
            raise ValueError(f"fault point {self.point!r}: the number after @ must be at least 1, not {self.nth}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `POINT.OUTCOME` or `POINT.OUTCOME@N`.

        Raises:
            ValueError: The text is invalid, or the point does not exist.
        """
        place, _, nth = text.strip().partition("@")
        point, _, outcome = place.rpartition(".")  # stage names may have dots
        if outcome not in set(FaultOutcome) or not (nth or "1").isdecimal():
            raise ValueError(
                f"{text!r} is not a fault: write POINT.before, .after, .error or .unanswered, optionally followed by @N"
            )
        return cls(point, FaultOutcome[outcome.upper()], int(nth or "1"))

    def matches(self, point: str) -> bool:
        """Whether `point` is this fault's point, or one of its kind."""
        return point == self.point or point.startswith(f"{self.point}:")

    def __str__(self) -> str:
        return f"{self.point}.{self.outcome}@{self.nth}"


class Faults(Protocol):
    """Decides the outcome of effects."""

    def effect(self, point: str, action: Callable[[], T]) -> T:
        """Run `action`, or not, and return what it returns."""
        ...


class NoFaults:
    """Applies every effect without a fault."""

    def effect(self, point: str, action: Callable[[], T]) -> T:
        return action()


def kill() -> NoReturn:
    """End the driver and this process as a power loss would: SIGKILL, nothing is flushed or closed."""
    driver = os.environ.get(PID)
    if driver and int(driver) != os.getpid():
        os.kill(int(driver), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process is still running after SIGKILL")


class Injector:
    """Gives chosen effects a scripted outcome.

    Args:
        faults: Faults to inject. Each counts the times that its point is reached.
        crash: Function that simulates a crash. It must not return; a simulator raises its own exception.

    Attributes:
        reached: Number of times that each point was reached, so that a harness can list the possible faults.
    """

    def __init__(self, faults: Sequence[Fault] = (), crash: Callable[[], NoReturn] = kill) -> None:
        self.faults = tuple(faults)
        self.reached: Counter[str] = Counter()
        self._crash = crash
        self._times = [0] * len(self.faults)
        self._lock = threading.Lock()

    def effect(self, point: str, action: Callable[[], T]) -> T:
        fault = self._due(point)
        if fault is None:
            return action()
        _log.warning("injected fault %s at %s", fault, point)
        if fault.outcome in (FaultOutcome.AFTER, FaultOutcome.UNANSWERED):
            action()
        if fault.outcome in (FaultOutcome.BEFORE, FaultOutcome.AFTER):
            self._crash()
        raise Transient(f"injected at {point}: {fault.outcome.text}")

    def _due(self, point: str) -> Fault | None:
        due = None
        with self._lock:
            self.reached[point] += 1
            for place, fault in enumerate(self.faults):
                if fault.matches(point):
                    self._times[place] += 1
                    if self._times[place] == fault.nth:
                        due = fault
        return due


F = TypeVar("F", bound=Faults)

_log = logging.getLogger("headwater.faults")
_current: Faults | None = None


def effect(point: str, action: Callable[[], T]) -> T:
    """Run one external effect with the active faults.

    Args:
        point: Name of the point, one of `known_points()`.
        action: The effect.

    Raises:
        Transient: Raised by the active faults, in addition to whatever `action` raises.
        ValueError: `HEADWATER_FAULT` is invalid.
    """
    global _current
    if _current is None:
        _current = from_environment(os.environ)
    return _current.effect(point, action)


def from_environment(environment: Mapping[str, str]) -> Faults:
    """The faults that `HEADWATER_FAULT` describes.

    Raises:
        ValueError: It is invalid, or names an unknown point.
    """
    spec = environment.get(SPEC, "").strip()
    return Injector([Fault.parse(text) for text in spec.split(",")]) if spec else NoFaults()


@contextmanager
def use(faults: F) -> Iterator[F]:
    """Activate `faults` in this process until the block ends."""
    global _current
    before, _current = _current, faults
    try:
        yield faults
    finally:
        _current = before


def _is_known(point: str) -> bool:
    kind, _, name = point.partition(":")
    return point in _POINTS or any(
        known.startswith(f"{kind}:") and (not name or known.partition(":")[2].isupper()) for known in _POINTS
    )

"""What became of a record: the results of `explain`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from aggregations.definition.flow import END_OF_FLOW
from aggregations.report import Report
from envelope import Reason, Verdict
from jobs.explaining.copies import Copy, Read
from jobs.table.view import key_as_json
from jobs.tracing import Place


class Outcome(StrEnum):
    """What became of a record, or of an element of it at a stage."""

    FOLDED = "folded"
    """The state of its key holds it; at a filter, that the filter passed it on."""
    DROPPED = "dropped"
    """It was not folded: another record of its event was, or its verdict says why."""
    DEAD_LETTER = "dead_letter"
    """It went to the dead-letter topic."""
    REMOVED = "removed"
    """A step of the flow removed it: a filter, a branch, a `flat_map` without items; or it has no value."""
    PUBLISHED = "published"
    """The flow has no stage, and its steps published it."""
    NOT_READ = "not_read"
    """The flow has not read it yet."""
    SKIPPED = "skipped"
    """It is before the offset that the flow was given to begin at."""
    EXPIRED = "expired"
    """Retention has deleted it, so its keys are not known any more."""
    UNDECIDED = "undecided"
    """It was read, and states and searched records do not show what became of it."""
    MISSING = "missing"
    """It was read, and the state that should hold it does not. This contradicts the flow's promise."""


class Fate(StrEnum):
    """What became of a dead letter."""

    WAITING = "waiting"
    """It can be redriven: the flow has not folded its event."""
    SENT = "sent"
    """It was redriven, and the redriven record is not folded yet."""
    REDRIVEN = "redriven"
    """It was redriven, and its event is folded."""
    FILLED = "filled"
    """Another record of its event was folded."""
    DISCARDED = "discarded"
    """It was given up: its event counts as folded, and is not."""


SEVEREST: Final[Sequence[Outcome]] = (
    Outcome.MISSING,
    Outcome.DEAD_LETTER,
    Outcome.UNDECIDED,
    Outcome.FOLDED,
    Outcome.DROPPED,
    Outcome.REMOVED,
)
"""Which outcome of the elements of a record is that of the record, the first of them that occurs."""


@dataclass(frozen=True, slots=True)
class InBatch:
    """The batch that read a record.

    Attributes:
        batch: Its number.
        epoch: Epoch of the run that committed it; None if it is not known.
        time_ms: When it was committed, in milliseconds since 1970; None if it is not known.
        exact: Whether it is this batch; otherwise it is this one or an earlier one.
    """

    batch: int
    epoch: int | None = None
    time_ms: int | None = None
    exact: bool = False

    def as_json(self) -> dict[str, Any]:
        """The batch as a JSON object."""
        return {"batch": self.batch, "epoch": self.epoch, "committed_ms": self.time_ms, "exact": self.exact}


@dataclass(frozen=True, slots=True)
class AtStage:
    """What became of one element of a record at one stage.

    Attributes:
        stage: Name of the stage; `end` after the last one.
        outcome: What became of it.
        why: What shows it.
        key: Key of the state, in a stage with windows followed by the start of the window; None if it has none.
        indices: Its index in each flat-map.
        verdict: The verdict that dropped it, or at a filter perhaps did; None if it was not dropped, or the verdict is not
            known.
        reason: Reason code of its rejection.
        batch: The batch that folded it; None if it is not known.
        version: Version of the state now; 0 without a state.
        waits: It is a dead letter that the flow waits for: a hole in its state, or listed in the ledger.
        earlier: The record because of which it was dropped; None if it is not known, or there is none.
    """

    stage: str
    outcome: Outcome
    why: str
    key: bytes | None = None
    indices: tuple[int, ...] = ()
    verdict: Verdict | None = None
    reason: Reason | None = None
    batch: InBatch | None = None
    version: int = 0
    waits: bool = False
    earlier: Place | None = None

    def as_json(self) -> dict[str, Any]:
        """The element as a JSON object."""
        return {
            "stage": self.stage,
            "outcome": self.outcome.value,
            "why": self.why,
            **({"key": None} if self.key is None else key_as_json(self.key)),
            "indices": [*self.indices],
            "verdict": None if self.verdict is None else self.verdict.value,
            "reason": None if self.reason is None else self.reason.value,
            "in_batch": None if self.batch is None else self.batch.as_json(),
            "version": self.version,
            "waits": self.waits,
            "earlier": None if self.earlier is None else str(self.earlier),
        }


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter of a record.

    Attributes:
        place: Its coordinates in the dead-letter topic.
        stage: Stage that rejected the record, or that it was bound for.
        reason: Reason code; None for one that this version does not know.
        detail: What was wrong, without any value of the record.
        time_ms: Time of the rejection in milliseconds since 1970; None if unknown.
        fate: What became of it.
        redriven: The redriven record, if it was found.
    """

    place: Place
    stage: str
    reason: Reason | None
    detail: str
    time_ms: int | None
    fate: Fate
    redriven: Place | None = None

    def as_json(self) -> dict[str, Any]:
        """The dead letter as a JSON object."""
        return {
            "letter": str(self.place),
            "stage": self.stage,
            "reason": None if self.reason is None else self.reason.value,
            "detail": self.detail,
            "rejected_ms": self.time_ms,
            "fate": self.fate.value,
            "redriven_as": None if self.redriven is None else str(self.redriven),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a flow made of a record.

    Attributes:
        place: Coordinates of the record.
        outcome: What became of it.
        why: What shows it.
        lineage: Its lineage from the root on, as text; empty if it could not be read.
        event_id: Event id of its envelope; empty if it has none.
        key: Its key; None if it has none, or could not be read.
        timestamp_ms: Its timestamp in milliseconds since 1970; None if it could not be read.
        taken_by: The earlier record of the same event that took its place; None if there is none.
        stages: Its elements at each stage that they reach, in order of the stages.
        letters: Its dead letters.
        copies: Other records of the same event that were found, in order of their coordinates.
        outputs: Topics to which the flow's steps publish it.
    """

    place: Place
    outcome: Outcome
    why: str
    lineage: str = ""
    event_id: str = ""
    key: bytes | None = None
    timestamp_ms: int | None = None
    taken_by: Copy | None = None
    stages: tuple[AtStage, ...] = ()
    letters: tuple[Letter, ...] = ()
    copies: tuple[Copy, ...] = ()
    outputs: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The explanation as a JSON object."""
        return {
            "topic": self.place.topic,
            "partition": self.place.partition,
            "offset": self.place.offset,
            "outcome": self.outcome.value,
            "why": self.why,
            "lineage": self.lineage,
            "event_id": self.event_id,
            **({"key": None} if self.key is None else key_as_json(self.key)),
            "timestamp_ms": self.timestamp_ms,
            "taken_by": None if self.taken_by is None else self.taken_by.as_json(),
            "stages": [one.as_json() for one in self.stages],
            "letters": [one.as_json() for one in self.letters],
            "copies": [one.as_json() for one in self.copies],
            "outputs": [*self.outputs],
        }


def whole(
    rows: Sequence[AtStage], outputs: Sequence[str], report: Report, read: Read | None, *, has_letters: bool
) -> tuple[Outcome, str]:
    """The outcome of a record, and what shows it, from those of its elements."""
    if report.tombstones:
        return Outcome.REMOVED, "it has no value, and the source skips such records"
    if not rows:
        if outputs:
            return Outcome.PUBLISHED, f"to {', '.join(outputs)}"
        if read is not None and read.lineage.redriven is not None:
            return Outcome.UNDECIDED, "it was redriven: what was missing of it was published then"
        return Outcome.REMOVED, "nothing is made of it"
    outcome = next(one for one in SEVEREST if any(row.outcome is one for row in rows))
    if has_letters and outcome is not Outcome.MISSING:
        outcome = Outcome.DEAD_LETTER
    row = next((row for row in rows if row.outcome is outcome), rows[0])
    return outcome, f"stage {row.stage}: {row.why}" if row.stage != END_OF_FLOW else row.why


def taken_by(rows: Sequence[AtStage], copies: Sequence[Copy]) -> Copy | None:
    """The earlier record of the same event because of which a record was dropped; None if there is none."""
    row = next(row for row in rows if row.outcome is Outcome.DROPPED)
    return next((copy for copy in copies if copy.place == row.earlier), None)

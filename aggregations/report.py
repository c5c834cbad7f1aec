"""Report of a batch or a run: counts, and the records that went to the dead-letter topic."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregations.definition.element import Record
from envelope import Reason, Verdict
from envelope.raised import Raised

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that goes to the dead-letter topic, unchanged, with the reason.

    Attributes:
        record: The record.
        stage: Stage that it was bound for, or that could not fold it; empty for a record that could not be read,
            `end` after the last stage.
        reason: Reason code.
        detail: What was wrong, without any value of the message.
        hole: It left a hole in the states of its keys at that stage.
        items: Its items that the flow diverted, by their index in each flat-map; empty for the record as a whole.
        raised: Exception of user code, when that is the reason; else None.
    """

    record: Record
    stage: str
    reason: Reason
    detail: str
    hole: bool = False
    items: tuple[tuple[int, ...], ...] = ()
    raised: Raised | None = None


@dataclass(slots=True)
class Report:
    """Counts of a batch, or of a whole run.

    On Spark the counts are those of the attempt that committed the batch: messages that an earlier attempt had already
    persisted count as duplicates.

    Attributes:
        records: Records read.
        verdicts: Count per stage and verdict.
        reasons: Count of dead letters per reason code.
        raised: Count of dead letters per exception of user code: stage, reason code, exception and line, no value.
        filtered: Elements that a filter removed.
        tombstones: Records without a value that were skipped.
        outputs: Messages published.
        retired: Lanes retired to their floor.
        removed: Count per stage of states that have left the store because they were due.
        keyless: Count per stage of messages that were republished without a key: a copy may arrive over any
            partition.
        batches: Batches committed.
        unpublished: Count per stage of states that were not published, because they are too large for their topic.
        warnings: Signs that a filter is used wrongly, and in how many states.
    """

    records: int = 0
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    filtered: int = 0
    tombstones: int = 0
    outputs: int = 0
    retired: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    keyless: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    unpublished: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)

    def add_copies(self, copies: Mapping[str, int]) -> None:
        """Count redriven copies that were dropped before their key was known, by stage."""
        for stage, count in copies.items():
            self.verdicts.setdefault(stage, Counter())[Verdict.COPY.value] += count

    def add(self, other: "Report") -> None:
        """Add another report's counts."""
        self.records += other.records
        for stage, counts in other.verdicts.items():
            self.verdicts.setdefault(stage, Counter()).update(counts)
        self.reasons.update(other.reasons)
        self.raised.update(other.raised)
        self.filtered += other.filtered
        self.tombstones += other.tombstones
        self.outputs += other.outputs
        self.retired += other.retired
        self.removed.update(other.removed)
        self.keyless.update(other.keyless)
        self.batches += other.batches
        self.unpublished.update(other.unpublished)
        self.warnings.update(other.warnings)

    def log_raised(self, log: logging.Logger) -> None:
        """Log what user code raised, and warnings; the exceptions' texts are only in the dead letters."""
        for warning in self.warnings:
            log.warning("%s", warning)
        for cause, count in self.raised.most_common(_SHOWN):
            log.warning("%d dead letter%s of %s", count, "s" * (count != 1), cause)
        if len(self.raised) > _SHOWN:
            log.warning("further causes of dead letters: %d", len(self.raised) - _SHOWN)

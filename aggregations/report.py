"""What a batch or a run did: counts, and the records that went to the dead-letter topic."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from aggregations.definition.element import Record
from envelope import Reason
from envelope.raised import Raised

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that goes to the dead-letter topic, as it came, with why.

    Attributes:
        record: The record.
        stage: Stage that it was on its way to, or that could not fold it; empty for a record that could not be read,
            `end` behind the last stage.
        reason: Reason code.
        detail: What was wrong, without any value of the message.
        hole: It left a hole under its keys at that stage.
        items: Its items that the flow diverted, by their index in each flat-map; empty for the record as a whole.
        raised: What user code raised, where that is the reason.
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
    """What a batch, or a whole run, did.

    On Spark the counts are those of the attempt that committed the batch: what an attempt before it had persisted in
    part is a duplicate to it.

    Attributes:
        records: Records read.
        verdicts: Count per stage and verdict.
        reasons: Count of dead letters per reason code.
        raised: Count of dead letters by what user code raised: stage, reason code, exception and line, no value.
        filtered: Elements that a filter left out.
        tombstones: Records without a value that were skipped.
        outputs: Messages published.
        retired: Lanes retired to their floor.
        keyless: Count per stage of messages that were republished without a key on their way: a copy of one may come over
            any partition.
        batches: Batches committed.
    """

    records: int = 0
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    raised: Counter[str] = field(default_factory=Counter)
    filtered: int = 0
    tombstones: int = 0
    outputs: int = 0
    retired: int = 0
    keyless: Counter[str] = field(default_factory=Counter)
    batches: int = 0

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
        self.keyless.update(other.keyless)
        self.batches += other.batches

    def log_raised(self, log: logging.Logger) -> None:
        """Say what user code raised; the exceptions' texts are in the dead letters alone."""
        for cause, count in self.raised.most_common(_SHOWN):
            log.warning("%d dead letters of %s", count, cause)
        if len(self.raised) > _SHOWN:
            log.warning("%d further causes of dead letters", len(self.raised) - _SHOWN)

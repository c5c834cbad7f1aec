"""Statistics of a copy."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(slots=True)
class CopyStatistics:
    """Counts since the start of a run, of committed work.

    Attributes:
        read: Records, rows or lines that were read.
        written: Messages that are visible in the target topic.
        tombstones: Records without a value that were skipped.
        copies: Redriven records that another application rejected: they were copied before.
        dead_lettered: Records sent to the dead-letter topic, by reason code.
        expired: Records that retention deleted before they were read.
        commits: Transactions.
        sequence: Highest sequence id in the target topic, earlier runs included; None if the source has no ids.
        epoch: Number of this run of the copy.
        seconds: Seconds since the start.
    """

    read: int = 0
    written: int = 0
    tombstones: int = 0
    copies: int = 0
    dead_lettered: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    commits: int = 0
    sequence: int | None = None
    epoch: int = 0
    seconds: float = 0.0
    _started: float = field(default_factory=time.monotonic, repr=False)

    def add(self, batch: "CopyStatistics") -> None:
        """Add the counts of a batch that was committed."""
        self.read += batch.read
        self.written += batch.written
        self.tombstones += batch.tombstones
        self.copies += batch.copies
        self.dead_lettered.update(batch.dead_lettered)
        self.expired += batch.expired
        self.commits += 1
        self.seconds = time.monotonic() - self._started

    def as_dict(self) -> dict[str, Any]:
        """The counts as plain values, for JSON."""
        names = ("read", "written", "tombstones", "copies", "expired", "commits", "sequence", "epoch")
        counts: dict[str, Any] = {name: getattr(self, name) for name in names}
        return counts | {"dead_lettered": dict(self.dead_lettered), "seconds": round(self.seconds, 3)}


OnCopied: TypeAlias = Callable[[CopyStatistics], None]
"""Called after each commit."""

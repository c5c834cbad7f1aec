"""Statistics of a republisher."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class TopicGrowth:
    """New partitions of a topic that wait until the old ones are read.

    Attributes:
        partitions_before: Number of partitions before the growth.
        partitions_now: Number of partitions now.
        unread: Number of offsets in the old partitions that must be read first; None until their ends are taken.
    """

    partitions_before: int
    partitions_now: int
    unread: int | None = None


@dataclass(slots=True)
class Statistics:
    """Counts since the start of a run, of acknowledged work. It is also committed, except during a rebalance.

    Attributes:
        consumed: Input records.
        produced: Messages acknowledged by the target topics.
        dropped: Input records for which the transform returned nothing.
        copies: Redriven input records that another application rejected: this one has forwarded them before.
        tombstones: Input records without a value that were skipped.
        retried: Input records sent to a retry topic.
        dead_lettered: Input records sent to the dead-letter topic, by reason code.
        verdicts: Input records that the filter has judged, by verdict.
        expired: Input records that retention deleted before they were read.
        commits: Commits of input offsets.
        rebalances: Number of times that partitions were assigned or revoked.
        waiting: Missing topics that the service waits for.
        waited: Seconds spent waiting for topics.
        growing: Growth by topic, for topics with waiting new partitions.
        seconds: Seconds since the start.
    """

    consumed: int = 0
    produced: int = 0
    dropped: int = 0
    copies: int = 0
    tombstones: int = 0
    retried: int = 0
    dead_lettered: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    commits: int = 0
    rebalances: int = 0
    waiting: tuple[str, ...] = ()
    waited: float = 0.0
    growing: dict[str, TopicGrowth] = field(default_factory=dict)
    seconds: float = 0.0
    _started: float = field(default_factory=time.monotonic, repr=False)

    def add(self, batch: "Statistics") -> None:
        """Add the counts of a batch that was committed."""
        self.consumed += batch.consumed
        self.produced += batch.produced
        self.dropped += batch.dropped
        self.copies += batch.copies
        self.tombstones += batch.tombstones
        self.retried += batch.retried
        self.dead_lettered.update(batch.dead_lettered)
        self.verdicts.update(batch.verdicts)
        self.commits += 1
        self.seconds = time.monotonic() - self._started

    def as_dict(self) -> dict[str, Any]:
        """The counts as plain values, for JSON."""
        names = (
            "consumed",
            "produced",
            "dropped",
            "copies",
            "tombstones",
            "retried",
            "expired",
            "commits",
            "rebalances",
        )
        counts: dict[str, Any] = {name: getattr(self, name) for name in names}
        return counts | {
            "dead_lettered": dict(self.dead_lettered),
            "verdicts": dict(self.verdicts),
            "waiting": list(self.waiting),
            "waited": round(self.waited, 3),
            "growing": {topic: asdict(growth) for topic, growth in self.growing.items()},
            "seconds": round(self.seconds, 3),
        }


OnStatistics: TypeAlias = Callable[[Statistics], None]
"""Called after each commit, during a wait for topics, and when the growth of a topic begins, changes or ends."""

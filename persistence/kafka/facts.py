"""What a broker tells about a topic."""

from dataclasses import dataclass
from typing import Final

BEYOND_END: Final = "beyond-end"
"""Risk that a log lost records that were read."""


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic as the broker describes it.

    Attributes:
        name: Its name.
        topic_id: Its id in URL-safe base64, as `kafka-topics --describe` prints it; a topic created again has another.
        partitions: Number of its partitions.
    """

    name: str
    topic_id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The ends of one partition's log.

    Attributes:
        low: First offset in the log.
        high: Offset that the next record will get, or the first offset of an open transaction.
        leader_epoch: Epoch of the partition's leader; None if the broker gives none.
    """

    low: int
    high: int
    leader_epoch: int | None = None

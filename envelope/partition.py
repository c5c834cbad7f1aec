"""A partition of a topic: the key of offsets and of other facts per partition."""

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """A partition of a topic. It equals the plain tuple of both and has its hash.

    Attributes:
        topic: Name of the topic.
        partition: Number of the partition.
    """

    topic: str
    partition: int

"""One partition that a republisher reads, and its delivered messages."""

from collections.abc import Sequence
from typing import Protocol

from confluent_kafka import KafkaError

from envelope.hops import HopWriter
from jobs.republish.growth import Note


class Consumed(Protocol):
    """A delivered message: confluent-kafka's `Message`, with the types that it has after delivery."""

    def error(self) -> KafkaError | None: ...
    def topic(self) -> str: ...
    def partition(self) -> int: ...
    def offset(self) -> int: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> list[tuple[str, bytes | None]] | None: ...
    def timestamp(self) -> tuple[int, int]: ...
    def leader_epoch(self) -> int | None: ...
    def __len__(self) -> int: ...


def bytes_of(messages: Sequence[Consumed]) -> int:
    """Bytes of the values of messages, or of keys and values where that costs less."""
    size: int | None = getattr(messages, "nbytes", None)
    return sum(map(len, messages)) if size is None else size


class InputPartition:
    """One assigned partition.

    Attributes:
        topic: Its topic.
        partition: Its number.
        hops: Writer of the hops for its records.
        topic_id: Kafka's id of the topic.
        begin: Offset to start at when nothing is committed.
        next: Offset after the last processed record; None before the first.
        committed: `next` at the last commit.
        leader_epoch: Leader epoch of the last processed record; None when unknown.
        note: Note to commit with the offset ...
        noted: ... and the note at the last commit.
        end: Offset at which it counts as caught up; None when no end was requested.
        due_ms: When its next record is due, in milliseconds since 1970; 0 when it is not waiting.
    """

    __slots__ = (
        *("begin", "committed", "due_ms", "end", "hops", "leader_epoch", "note", "next", "noted", "partition"),
        *("topic", "topic_id"),
    )

    def __init__(self, topic: str, partition: int, via: str, topic_id: str, end: int | None, cluster: str) -> None:
        self.topic = topic
        self.partition = partition
        self.topic_id = topic_id
        self.hops = HopWriter(topic, partition, via, topic_id=topic_id, cluster=cluster)
        self.begin = 0
        self.next: int | None = None
        self.committed: int | None = None
        self.leader_epoch: int | None = None
        self.note = self.noted = Note(topic_id)
        self.end = end
        self.due_ms = 0

    @property
    def done(self) -> int:
        """Offset up to which the group has committed it."""
        return self.begin if self.committed is None else self.committed

    @property
    def position(self) -> int:
        """Offset up to which it is processed."""
        return self.done if self.next is None else self.next

    @property
    def caught_up(self) -> bool:
        """Whether all records that were there at the start have been processed."""
        return self.end is not None and (self.next or 0) >= self.end

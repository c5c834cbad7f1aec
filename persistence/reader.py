"""A reader whose positions are stored beside its data (Pulsar's Reader, PIP-6), and snapshots of sequence maps."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from envelope import TopicPartition
from envelope.filters.sequence_maps import Snapshot
from envelope.limits import OFFSET_MASK
from persistence.kept import KeptValues, merged_topic_ids
from persistence.protocol import StateStore

_ONLY = b"value"


class Reader:
    """Applies each record of its topics to a value once, whatever is read again.

    The value and the positions that it covers are one state of the store, so a crash leaves both before a batch or both
    after it. A new reader of the same name fences the one before it. After an error, make a new reader.

    Args:
        store: A store, or its URL.
        name: Name of the reader.
        zero: The value before the first record, a JSON value.
        generation: Another generation begins with `zero`.
    """

    def __init__(self, store: StateStore | str, name: str, zero: Any, *, generation: int = 1) -> None:
        self._values = KeptValues(store, name, "Reader", generation=generation)
        self._kept = self._values.load([_ONLY])[_ONLY]
        if not self._kept.version:
            self._kept.value = deepcopy(zero)

    @property
    def value(self) -> Any:
        """The value as stored last."""
        return self._kept.value

    @property
    def start(self) -> Mapping[TopicPartition, int]:
        """Offset to read next, by topic and partition; a partition that is not there is read from its beginning."""
        return {place: position & OFFSET_MASK for place, position in self._kept.positions.items()}

    def process(self, records: Iterable[Any], step: Callable[[Any, Any], Any]) -> int:
        """Apply records that the value does not contain, in order, and store the value with its positions.

        Args:
            records: Records in the order in which they were read: anything with topic, partition and offset. With a
                `leader_epoch`, records that were written anew at offsets that were read are applied, too.
            step: Returns the next value, given the value and a record. It may change the value in place.

        Returns:
            Number of records that were applied.

        Raises:
            Terminal: A topic was created again, as the topic ids of the records show.
            StoreError: The store failed, or a newer reader of this name has begun.
        """
        applied, batch = 0, list(records)
        self._kept.topic_ids = merged_topic_ids(self._kept.topic_ids, batch, self._values.ref)
        for record in batch:
            if not self._kept.covers(record):
                self._kept.value = step(self._kept.value, record)
                self._kept.advance(record)
                applied += 1
        if applied:
            self._values.save({_ONLY: self._kept})
        return applied

    def close(self) -> None:
        """Release the store's connections."""
        self._values.close()


class SequenceSnapshots:
    """Snapshots of sequence maps in a store, one for each log. A new object of the same name fences the one before it.

    Args:
        store: A store, or its URL.
        name: Name of the writer whose maps these are.
    """

    def __init__(self, store: StateStore | str, name: str) -> None:
        self._values = KeptValues(store, name, "Snapshot")

    def load(self, topic: str, partition: int, topic_id: str = "") -> Snapshot | None:
        """The latest snapshot of a log; None before the first, and if it is of another topic of this name.

        Args:
            topic: The topic.
            partition: The partition.
            topic_id: Kafka's id of the topic, if it is known.
        """
        key = f"{topic}:{partition}".encode()
        kept = self._values.load([key])[key]
        other = topic_id and kept.topic_ids.get(topic, topic_id) != topic_id
        return None if kept.value is None or other else Snapshot.load(kept.value)

    def save(self, topic: str, partition: int, snapshot: Snapshot, topic_id: str = "") -> None:
        """Replace the snapshot of a log.

        Args:
            topic: The topic.
            partition: The partition.
            snapshot: The snapshot.
            topic_id: Kafka's id of the topic, if it is known.

        Raises:
            Fenced: A newer writer of this name has begun.
            StoreError: The store failed. The snapshot before is still there, or this one is.
        """
        key = f"{topic}:{partition}".encode()
        kept = self._values.load([key])[key]
        kept.value = snapshot.dump()
        kept.positions = {TopicPartition(topic, partition): snapshot.next_offset}
        kept.topic_ids = {topic: topic_id} if topic_id else {}
        self._values.save({key: kept})

    def close(self) -> None:
        """Release the store's connections."""
        self._values.close()

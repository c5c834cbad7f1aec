"""Highest sequence numbers for a writer that stores messages of named producers in a log (Pulsar PIP-6).

`pushed` has what was sent to the log, `persisted` what the log has acknowledged: sent is not stored. A snapshot of
`persisted` names the offset up to which it is complete. Recovery is the latest snapshot and a replay of the log after it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from envelope.dedup.verdict import Verdict

SNAPSHOT_EVERY: Final = 1000
"""Entries between two snapshots."""
PRODUCERS: Final = 10_000
"""Producers in a map; beyond, the one whose last entry is the oldest is forgotten."""


class Entry(NamedTuple):
    """One message in the log.

    Attributes:
        offset: Its offset.
        producer: Name of its producer; None if it takes no part.
        sequence: Its sequence number, if it has a producer.
    """

    offset: int
    producer: str | None = None
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The persisted map at a position of the log.

    Attributes:
        next_offset: Every entry below it is in the map, none at or above it.
        sequences: Highest sequence number by producer, the producer whose last entry is the oldest first.
        leader_epoch: Epoch of the log's leader when it was made; None if it is not known.
    """

    next_offset: int = 0
    sequences: Mapping[str, int] = field(default_factory=dict)
    leader_epoch: int | None = None

    def dump(self) -> dict[str, Any]:
        """The snapshot as a readable JSON value."""
        epoch = {} if self.leader_epoch is None else {"leader_epoch": self.leader_epoch}
        return {"next_offset": self.next_offset, "sequences": dict(self.sequences), **epoch}

    @classmethod
    def load(cls, value: Any) -> "Snapshot":
        """The snapshot that `dump` returned this value for."""
        return cls(value["next_offset"], dict(value["sequences"]), value.get("leader_epoch"))


class SequenceMaps:
    """The maps of one log, which is a partition of a topic. The log acknowledges entries in the order in which they were sent.

    Args:
        snapshot: The latest snapshot; None for an empty log.
        tail: The entries of the log from the snapshot's `next_offset` on, in order.
        every: Entries between two snapshots.
        limit: Producers in the map.
    """

    def __init__(
        self,
        snapshot: Snapshot | None = None,
        tail: Iterable[Entry] = (),
        *,
        every: int = SNAPSHOT_EVERY,
        limit: int = PRODUCERS,
    ) -> None:
        if every < 1 or limit < 1:
            raise ValueError(f"every={every}, limit={limit}: use at least 1")
        snapshot = snapshot or Snapshot()
        self._every, self._limit = every, limit
        self._persisted: OrderedDict[str, int] = OrderedDict(snapshot.sequences)
        self._next_offset = snapshot.next_offset
        self._covered = snapshot.next_offset
        self._entries = 0
        self._sent: deque[tuple[str | None, int]] = deque()
        self._waiting: Counter[str] = Counter()
        self._pushed: dict[str, int] = {}
        for entry in tail:
            self._store(entry)

    def push(self, producer: str | None, sequence: int = 0) -> Verdict:
        """Decide about a message before it is sent to the log.

        Returns:
            `ACCEPTED`: send it. `DUPLICATE`: the log contains it or a later one; confirm it. `IN_FLIGHT`: it, or a later
            one, was sent and has no answer yet; the producer asks again.
        """
        if producer is not None:
            if sequence <= self._persisted.get(producer, sequence - 1):
                return Verdict.DUPLICATE
            if sequence <= self._pushed.get(producer, sequence - 1):
                return Verdict.IN_FLIGHT
            self._pushed[producer] = sequence
            self._waiting[producer] += 1
        self._sent.append((producer, sequence))
        return Verdict.ACCEPTED

    def acknowledged(self, offset: int) -> Snapshot | None:
        """Note that the log has stored the oldest entry in flight.

        Returns:
            A snapshot to be stored, every N entries; otherwise None.

        Raises:
            ValueError: Nothing is in flight, or the offset is not above the last one.
        """
        if not self._sent:
            raise ValueError(f"offset {offset} was acknowledged, and nothing is in flight")
        producer, sequence = self._sent[0]
        self._store(Entry(offset, producer, sequence))
        self._landed()
        if self._entries < self._every:
            return None
        return self.snapshot()

    def failed(self) -> list[tuple[str | None, int]]:
        """Note that the log did not store the oldest entry in flight, nor any after it.

        They are accepted when their producers send them again, in order. The caller must know that they were not
        stored, for example because the writer is fenced. After an unknown outcome, recover from the log instead.

        Returns:
            Producer and sequence number of what was in flight, the oldest first.
        """
        lost = list(self._sent)
        self._sent.clear()
        self._waiting.clear()
        self._pushed.clear()
        return lost

    def snapshot(self) -> Snapshot:
        """The persisted map as of now. The next one that is due comes N entries later."""
        self._entries, self._covered = 0, self._next_offset
        return Snapshot(self._next_offset, dict(self._persisted))

    @property
    def pushed(self) -> dict[str, int]:
        """Highest number by producer that was sent to the log."""
        return {**self._persisted, **self._pushed}

    def highest(self, producer: str) -> int | None:
        """Highest number of a producer that was sent to the log; None for an unknown producer."""
        return self._pushed.get(producer, self._persisted.get(producer))

    @property
    def persisted(self) -> dict[str, int]:
        """Highest number by producer that the log contains."""
        return dict(self._persisted)

    @property
    def covered(self) -> int:
        """Offset below which the latest snapshot contains everything."""
        return self._covered

    def last_sequence_id(self, producer: str) -> int | None:
        """Highest number of a producer in the log, after which it resumes; None for an unknown producer."""
        return self._persisted.get(producer)

    def _store(self, entry: Entry) -> None:
        if entry.offset < self._next_offset:
            raise ValueError(f"offset {entry.offset} comes after {self._next_offset - 1}: a log is read in order")
        self._next_offset = entry.offset + 1
        self._entries += 1
        if entry.producer is None:
            return
        known = self._persisted.pop(entry.producer, entry.sequence)
        self._persisted[entry.producer] = max(known, entry.sequence)
        while len(self._persisted) > self._limit:
            self._persisted.popitem(last=False)

    def _landed(self) -> None:
        """Remove the oldest entry in flight."""
        producer, _ = self._sent.popleft()
        if producer is not None:
            self._waiting[producer] -= 1
            if not self._waiting[producer]:
                del self._waiting[producer], self._pushed[producer]


@dataclass(frozen=True, slots=True)
class DedupPolicy:
    """Where duplicates are removed: for all topics, for a namespace, for a topic. The most specific setting wins.

    Attributes:
        default: The setting of topics that no other names.
        namespaces: Settings by prefix of topics' names, for example `payments.`; the longest prefix wins.
        topics: Settings by topic.
    """

    default: bool = False
    namespaces: Mapping[str, bool] = field(default_factory=dict)
    topics: Mapping[str, bool] = field(default_factory=dict)

    def enabled(self, topic: str) -> bool:
        """Whether duplicates are removed in a topic."""
        if topic in self.topics:
            return self.topics[topic]
        prefix = max((one for one in self.namespaces if topic.startswith(one)), key=len, default=None)
        return self.default if prefix is None else self.namespaces[prefix]


EVERYWHERE: Final = DedupPolicy(default=True)
"""Duplicates are removed in every topic."""

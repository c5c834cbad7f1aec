"""The journal of a flow: a Kafka topic with an entry for each batch, for what cannot be derived from the states later.

    {"schema":1,"flow":"fleet","epoch":3,"batch":17,"time_ms":1700000000000,"topic_ids":{"legs":"Qx1..."},
     "read":{"legs":{"0":[100,180]}},"dropped":{"aircraft":{"duplicate":{"legs":{"0":[104,3,9,1]}}}}}

An entry says which offsets the batch read, and which of them each stage dropped. Positions, keys and lineages are in the
records themselves. Kafka's retention bounds the journal. An entry is written after the manifest of its batch, without
waiting for its acknowledgement: a crash may lose entries, and a broker that refuses them ends no run.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec
import numpy as np

from aggregations.columns.arrays import Ints
from aggregations.engine.ranges import Range
from aggregations.per_message.stage import Decided
from envelope import TopicPartition, Verdict
from persistence.commit.faults import JOURNAL, effect
from persistence.errors import Transient
from persistence.kafka import AcknowledgedProducer, BrokerError, KafkaSettings
from persistence.protocol import FlowRef

_LOG = logging.getLogger("headwater.engine")

SCHEMA: Final = 1
MOST_OFFSETS: Final = 100_000
"""Offsets that one task lists of a batch, 0.8 MB; further ones are only counted."""
MOST_RUNS: Final = 20_000
"""Runs of consecutive offsets in one entry, at most about 200 kB; a replayed range is one run."""
_FLUSH_SECONDS: Final = 5.0

Runs: TypeAlias = Sequence[int]
"""Ascending offsets: the first one, how many follow each other, the gap to the next one, how many follow, ..."""
Offsets: TypeAlias = dict[tuple[str, str, str, int], list[Ints]]
"""Offsets by stage, verdict, topic and partition."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a batch did.

    Attributes:
        flow: Name of the flow.
        epoch: Epoch of the run.
        batch: Its number.
        time_ms: When its manifest was written, in milliseconds since 1970.
        topic_ids: Id of each topic that it read.
        read: First and next offset that it read, by topic and partition; both are the next one if it read nothing.
        dropped: Offsets that were dropped, by stage, verdict, topic and partition.
        unlisted: Number of further elements that were dropped, by stage.
        again: The batch, or a part of it, had been folded before: what its stages hold from then counts as dropped.
        generation: Generation of the flow.
        schema: Version of this layout.
    """

    flow: str
    epoch: int
    batch: int
    time_ms: int
    topic_ids: Mapping[str, str]
    read: Mapping[str, Mapping[int, tuple[int, int]]]
    dropped: Mapping[str, Mapping[str, Mapping[str, Mapping[int, Runs]]]] = {}
    unlisted: Mapping[str, int] = {}
    again: bool = False
    generation: int = 1
    schema: int = SCHEMA

    def verdict(self, stage: str, topic: str, partition: int, offset: int) -> Verdict | None:
        """The verdict with which a stage dropped a record; None if it is not listed."""
        for verdict, topics in self.dropped.get(stage, {}).items():
            if offset in Listed(topics.get(topic, {}).get(partition, ())):
                return Verdict(verdict)
        return None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    """Serialize an entry to one line of JSON."""
    return _encoder.encode(entry)


def decode_entry(value: bytes | None) -> Entry | None:
    """Parse what `encode_entry` wrote; None for anything else, and for what a newer version wrote."""
    try:
        entry = _decoder.decode(value or b"")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return entry if entry.schema <= SCHEMA else None


def runs_of(offsets: Ints) -> list[int]:
    """Runs of ascending offsets."""
    if not len(offsets):
        return []
    ends = np.flatnonzero(np.diff(offsets) != 1)
    firsts = offsets[np.concatenate(([0], ends + 1))]
    lasts = offsets[np.concatenate((ends, [len(offsets) - 1]))]
    pairs = np.empty(2 * len(firsts), np.int64)
    pairs[1::2] = lasts - firsts + 1
    pairs[0] = firsts[0]
    pairs[2::2] = firsts[1:] - lasts[:-1]
    found: list[int] = pairs.tolist()
    return found


@dataclass(frozen=True, slots=True)
class Listed:
    """Offsets in runs."""

    runs: Runs

    def __contains__(self, offset: int) -> bool:
        return any(offset in run for run in self)

    def __iter__(self) -> Iterator[range]:
        last = 0
        for gap, length in zip(self.runs[::2], self.runs[1::2], strict=True):
            first = last + gap
            yield range(first, first + length)
            last = first + length - 1


@dataclass(slots=True)
class Dropped:
    """The elements that a batch, or a part of it, dropped, by the offsets of their records.

    Attributes:
        offsets: The offsets.
        unlisted: Number of further elements by stage.
    """

    offsets: Offsets = field(default_factory=dict)
    unlisted: dict[str, int] = field(default_factory=dict)

    def take(self, stage: str, verdict: str, topic: str, partitions: Ints, offsets: Ints) -> None:
        """Note elements that a stage dropped with one verdict.

        Args:
            stage: The stage.
            verdict: The verdict.
            topic: Topic of their records.
            partitions: Partition of each.
            offsets: Offset of each.
        """
        room = max(MOST_OFFSETS - sum(len(part) for parts in self.offsets.values() for part in parts), 0)
        if len(offsets) > room:
            self.unlisted[stage] = self.unlisted.get(stage, 0) + len(offsets) - room
            partitions, offsets = partitions[:room], offsets[:room]
        for partition in np.unique(partitions).tolist():
            self.offsets.setdefault((stage, verdict, topic, partition), []).append(offsets[partitions == partition])

    def decided(self, stage: str, decided: Iterable[Decided]) -> None:
        """Note what the pure code dropped."""
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for one in decided:
            if one.reason is None and not one.decision.fold and not one.arrival.transit:
                own = one.arrival.element.own
                found.setdefault((one.decision.verdict.value, own.topic), []).append((own.partition, own.offset))
        for (verdict, topic), places in found.items():
            columns = np.array(places, np.int64)
            self.take(stage, verdict, topic, columns[:, 0], columns[:, 1])

    def add(self, other: "Dropped") -> None:
        """Add another part's."""
        for place, parts in other.offsets.items():
            self.offsets.setdefault(place, []).extend(parts)
        for stage, count in other.unlisted.items():
            self.unlisted[stage] = self.unlisted.get(stage, 0) + count


def entry_of(
    ref: FlowRef,
    epoch: int,
    batch: int,
    time_ms: int,
    topic_ids: Mapping[str, str],
    ends: Mapping[TopicPartition, int],
    ranges: Iterable[Range],
    dropped: Dropped,
    *,
    again: bool,
) -> Entry:
    """The entry of a batch; see `Entry`.

    Args:
        ref: The flow.
        epoch: Epoch of the run.
        batch: Number of the batch.
        time_ms: When its manifest was written.
        topic_ids: Current id of each source.
        ends: Next offset of every partition after the batch.
        ranges: What it read.
        dropped: What it dropped.
        again: It had been folded before.
    """
    begun = {one.place: one.start for one in ranges}
    read: dict[str, dict[int, tuple[int, int]]] = {}
    for place, end in ends.items():
        read.setdefault(place.topic, {})[place.partition] = (begun.get(place, end), end)
    listed: dict[str, dict[str, dict[str, dict[int, Runs]]]] = {}
    unlisted, room = dict(dropped.unlisted), 2 * MOST_RUNS
    for (stage, verdict, topic, partition), parts in sorted(dropped.offsets.items(), key=lambda item: item[0]):
        runs = runs_of(np.unique(np.concatenate(parts)))
        if len(runs) > room:
            unlisted[stage] = unlisted.get(stage, 0) + sum(runs[room + 1 :: 2])
            runs = runs[:room]
        room -= len(runs)
        if runs:
            listed.setdefault(stage, {}).setdefault(verdict, {}).setdefault(topic, {})[partition] = runs
    ids = {topic: topic_ids[topic] for topic in read}
    return Entry(ref.flow, epoch, batch, time_ms, ids, read, listed, unlisted, again, ref.generation)


class Journal:
    """Writes the entries of a run.

    Args:
        settings: Settings of the Kafka cluster.
        topic: The topic.
    """

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._topic = topic
        self._producer = AcknowledgedProducer(settings)
        self._failed = False

    def write(self, entry: Entry) -> None:
        """Queue an entry. An error is logged, once in a row: the batch is committed, and `explain` knows less of it."""
        try:
            effect(JOURNAL, lambda: self._producer.send(self._topic, encode_entry(entry), entry.flow.encode()))
        except (BrokerError, Transient) as error:
            self._warn(error)
        else:
            self._failed = False

    def close(self) -> None:
        """Wait a moment for the acknowledgement of what is queued."""
        try:
            effect(JOURNAL, lambda: self._producer.flush(_FLUSH_SECONDS))
        except (BrokerError, Transient) as error:
            self._warn(error)
        self._producer.close()

    def _warn(self, error: BrokerError | Transient) -> None:
        if not self._failed:
            _LOG.warning(
                "journal %s: %s. The run continues; `headwater explain` lacks these batches", self._topic, error
            )
        self._failed = True

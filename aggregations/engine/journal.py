"""The journal of a flow: a Kafka topic with an entry for each batch, for what cannot be derived from the states later.

    {"schema":1,"flow":"fleet","epoch":3,"batch":17,"time_ms":1700000000000,"topic_ids":{"legs":"Qx1..."},
     "read":{"legs":{"0":[100,180]}},"dropped":{"aircraft":{"duplicate":{"legs":{"0":[104,3,9,1]}}}}}

An entry says which offsets the batch read, and which of them each stage dropped. Positions, keys and lineages are in the
records themselves. Kafka's retention bounds the journal. An entry is written after the manifest of its batch, without
waiting for its acknowledgement: a crash may lose entries, and a broker that refuses them ends no run.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from aggregations.engine.dropped import MOST_RUNS, Dropped, Listed, Runs, runs_of
from aggregations.engine.ranges import Range
from aggregations.engine.sampling import ALL, is_sampled
from envelope import Node, TopicPartition, Verdict
from persistence.commit.faults import JOURNAL, effect
from persistence.errors import Transient
from persistence.kafka import AcknowledgedProducer, BrokerError, BrokerUnavailable, KafkaSettings
from persistence.kafka.topics import MAX_MESSAGE_BYTES
from persistence.manifest import Progress
from persistence.protocol import FlowRef

_LOG = logging.getLogger("headwater.engine")

SCHEMA: Final = 1
_FLUSH_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 60.0
"""After an error: a client that fails at every batch would log a line, and be replaced, every time."""
_QUEUE_KBYTES: Final = 16 * 1024
_OVERHEAD_BYTES: Final = 1024
"""Of a record batch around one entry with its key, the flow's name."""
_UNANSWERED: Final = "Check that the topic exists, that enough of its replicas are in sync, and that the broker runs"


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
        share: Share of the events whose records `dropped` and `unlisted` are about.
        branches: Number of the log's branch that it read, by topic and partition, if it is not 0
            (`persistence.manifest.Progress`).
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
    share: float = ALL
    branches: Mapping[str, Mapping[int, int]] = {}

    def has(self, root: Node) -> bool:
        """Whether it lists the records of an event that were dropped, or would do so."""
        return is_sampled(self.share, root)

    def verdict(self, stage: str, topic: str, partition: int, offset: int) -> Verdict | None:
        """The verdict with which a stage dropped a record; None if it is not listed."""
        for verdict, topics in self.dropped.get(stage, {}).items():
            if offset in Listed(topics.get(topic, {}).get(partition, ())):
                return Verdict(verdict)
        return None

    def cut(self, most: int) -> "Entry":
        """The entry with at most so many runs; the elements of the others are counted in `unlisted`."""
        listed: dict[str, dict[str, dict[str, dict[int, Runs]]]] = {}
        unlisted, room = dict(self.unlisted), 2 * most
        for stage, verdicts in self.dropped.items():
            for verdict, topics in verdicts.items():
                for topic, partitions in topics.items():
                    for partition, runs in partitions.items():
                        if beyond := sum(runs[room + 1 :: 2]):
                            unlisted[stage] = unlisted.get(stage, 0) + beyond
                        if kept := runs[:room]:
                            listed.setdefault(stage, {}).setdefault(verdict, {}).setdefault(topic, {})[partition] = kept
                        room -= len(kept)
        return replace(self, dropped=listed, unlisted=unlisted)


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
    share: float = ALL,
    logs: Mapping[TopicPartition, Progress] | None = None,
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
        share: Share of the events that `dropped` is about.
        logs: Progress by partition.
    """
    begun = {one.place: one.start for one in ranges}
    read: dict[str, dict[int, tuple[int, int]]] = {}
    branches: dict[str, dict[int, int]] = {}
    for place, end in ends.items():
        start = begun.get(place, end)
        read.setdefault(place.topic, {})[place.partition] = (start, end)
        if logs is not None and place in logs and (number := logs[place].branch(start)):
            branches.setdefault(place.topic, {})[place.partition] = number
    listed: dict[str, dict[str, dict[str, dict[int, Runs]]]] = {}
    for (stage, verdict, topic, partition), parts in sorted(dropped.spans.items(), key=lambda item: item[0]):
        if runs := runs_of(parts):
            listed.setdefault(stage, {}).setdefault(verdict, {}).setdefault(topic, {})[partition] = runs
    ids = {topic: topic_ids[topic] for topic in read}
    entry = Entry(
        *(ref.flow, epoch, batch, time_ms, ids, read, listed, dropped.unlisted, again, ref.generation),
        share=share,
        branches=branches,
    )
    return entry.cut(MOST_RUNS)


class Journal:
    """Writes the entries of a run.

    Args:
        settings: Settings of the Kafka cluster.
        topic: The topic.
        share: Share of the events that its entries list.
        most_bytes: The topic's max.message.bytes: a longer entry lists fewer elements.

    Attributes:
        share: The same.
    """

    def __init__(
        self, settings: KafkaSettings, topic: str, share: float = ALL, *, most_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._topic = topic
        self.share = share
        self._most_bytes = most_bytes - _OVERHEAD_BYTES
        # If the topic takes nothing, the run waits so long whenever half of the queue is full, and gives the entries up.
        self._producer = AcknowledgedProducer(
            settings, delivery_timeout=_FLUSH_SECONDS, queue_buffering_max_kbytes=_QUEUE_KBYTES
        )
        self._sent = self._failed = False
        self._again_at = 0.0

    def write(self, entry: Entry) -> None:
        """Queue an entry. An error is logged, once in a row: the batch is committed, and `explain` knows less of it.

        After an error entries are given up for a minute.
        """
        if time.monotonic() < self._again_at:
            return
        value, runs = encode_entry(entry), MOST_RUNS
        while len(value) > self._most_bytes and runs:
            runs //= 2
            value = encode_entry(entry.cut(runs))
        try:
            if self._sent and self._producer.is_settled():
                self._failed = False
            effect(JOURNAL, lambda: self._producer.send(self._topic, value, entry.flow.encode()))
        except (BrokerError, Transient) as error:
            self._warn(error)
        else:
            self._sent = True

    def close(self) -> None:
        """Wait a moment for the acknowledgement of what is queued."""
        try:
            effect(JOURNAL, lambda: self._producer.flush(_FLUSH_SECONDS))
        except (BrokerError, Transient) as error:
            self._warn(error)
        self._producer.close()

    def _warn(self, error: BrokerError | Transient) -> None:
        if not self._failed:
            why = f"{error.what}. {_UNANSWERED}" if isinstance(error, BrokerUnavailable) else str(error)
            _LOG.warning("journal %s: %s. The run continues; `headwater explain` lacks these batches", self._topic, why)
        self._sent, self._failed = False, True
        self._again_at = time.monotonic() + _PAUSE_SECONDS

"""Reads ranges of a topic's partitions, with a consumer that stays and fetches ahead from one range to the next."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from persistence.kafka import BrokerUnavailable, KafkaSettings, assign
from persistence.kafka.errors import broker_error, passes

CHUNK_RECORDS = 50_000
"""Most records that are decoded together. Measured: 10,000 cost a third more, 100,000 a little more."""
CHUNK_BYTES = 64 << 20
"""Bytes of values after which a chunk is complete."""
_SILENCE_SECONDS = 30.0
"""Longest time without progress, in seconds, before the broker counts as unavailable."""
_PATIENCE_SECONDS = 0.05
"""Longest time to wait for a whole chunk, in seconds."""
_HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_CONSUMER: Final[dict[str, Any]] = {
    "check_crcs": True,
    "fetch_max_bytes": 64 << 20,
    "max_partition_fetch_bytes": 8 << 20,
    "queued_min_messages": 200_000,
    "queued_max_messages_kbytes": 128 << 10,
    "fetch_queue_backoff_ms": 20,
    "fetch_wait_max_ms": 100,  # as long as this, the end of a log is not noticed
}
NEEDED: Final[dict[str, Any]] = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
}
"""Settings of every consumer here that a user's settings do not override: a record would be missing, or an aborted one
would be read."""


class Range(NamedTuple):
    """Records of one partition.

    Attributes:
        partition: Its number.
        start: First offset.
        end: Offset after the last; there need not be a record right before it.
    """

    partition: int
    start: int
    end: int


class Slot(NamedTuple):
    """Ranges that one task reads.

    Attributes:
        number: Number of the slot. A partition is always in the same one.
        ranges: The ranges.
    """

    number: int
    ranges: tuple[Range, ...]


class Fetcher:
    """Reads ranges of one topic. Ranges that continue where the previous ones ended are read without a seek.

    Args:
        settings: Settings of the Kafka cluster.
        topic: The topic.
        group: Consumer group named to the broker; it is neither joined nor committed to.
    """

    def __init__(self, settings: KafkaSettings, topic: str, group: str) -> None:
        self._topic = topic
        try:
            self._consumer = Consumer(settings.client(group_id=group, **_CONSUMER) | NEEDED)
        except KafkaException as error:
            raise broker_error(error.args[0], f"setting up the consumer of {topic}") from error
        self._next: dict[int, int] = {}  # by assigned partition: where the range to read has to start
        self._reached: dict[int, int] = {}  # by assigned partition: up to here the client has delivered everything
        self._ahead: dict[int, list[Message]] = {}  # what was delivered and not yet asked for
        self._began: dict[int, int] = {}  # by partition: start of the range that is read
        self._paused: set[int] = set()  # so much of them is ahead that no more is delivered

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()

    def read(self, ranges: Sequence[Range], *, headers: bool, stays: bool) -> Iterator[pa.Table]:
        """Read the ranges.

        Args:
            ranges: The ranges.
            headers: Read headers, too.
            stays: The next ranges of these partitions are read here, too: fetch ahead.

        Yields:
            Records, about `CHUNK_RECORDS` or fewer at a time, those of a partition in ascending order: columns `key`
            and `value` (binary), `topic` (string), `partition` (int32), `offset` (int64), `timestamp` (milliseconds),
            and `headers` (list of structs of `key`, string, and `value`, binary).

        Raises:
            BrokerUnavailable: The broker does not deliver them.
            BrokerRefused: This user may not read the topic.
        """
        self._position(ranges)
        ends = {one.partition: one.end for one in ranges}
        held = [message for partition, end in ends.items() for message in self._take_ahead(partition, end)]
        size = sum(map(len, held))
        deadline, before = time.monotonic() + _SILENCE_SECONDS, -1
        while waiting := [one for one, end in ends.items() if self._reached[one] < end]:
            if len(held) >= CHUNK_RECORDS or size >= CHUNK_BYTES:
                yield self._table(held, headers=headers)
                held, size = [], 0
            left = sum(ends[one] - self._reached[one] for one in waiting)
            messages = self._consumer.consume(min(left, CHUNK_RECORDS - len(held)), _PATIENCE_SECONDS)
            wanted = self._sorted_out(messages, ends)
            held += wanted
            size += sum(map(len, wanted))
            if left != before:
                deadline, before = time.monotonic() + _SILENCE_SECONDS, left
            elif time.monotonic() > deadline:
                raise BrokerUnavailable(
                    f"reading {self._topic}:{min(waiting)}: nothing came in {_SILENCE_SECONDS:g} s",
                    "Look at the broker. The batch is tried again; nothing was committed",
                )
        if held:
            yield self._table(held, headers=headers)
        if stays:
            self._next |= ends
        else:
            self._resume()  # a pause outlasts its assignment
            self._consumer.unassign()
            self._next, self._reached, self._ahead = {}, {}, {}

    def _table(self, messages: list[Message], *, headers: bool) -> pa.Table:
        values = pa.array([one.value() for one in messages], pa.binary())
        columns = {
            "key": pa.array([one.key() for one in messages], pa.binary()),
            "value": values,
            "topic": pa.repeat(self._topic, len(messages)),
            "partition": pa.array([one.partition() for one in messages], pa.int32()),
            "offset": pa.array([one.offset() for one in messages], pa.int64()),
            "timestamp": pa.array([one.timestamp()[1] for one in messages], pa.timestamp("ms")),
        }
        if headers:
            columns["headers"] = pa.array([_headers(one.headers()) for one in messages], _HEADERS)
        return pa.table(columns)

    def _position(self, ranges: Sequence[Range]) -> None:
        """Assign partitions, unless the consumer stands where the ranges start.

        Until they are read, it stands nowhere: after a failure it is not known what was delivered.
        """
        stands = all(self._next.get(one.partition) == one.start for one in ranges)
        self._began = {one.partition: one.start for one in ranges}
        others = {one: start for one, start in self._next.items() if one not in {two.partition for two in ranges}}
        if not stands:
            starts = {**others, **{one.partition: one.start for one in ranges}}
            assign(self._consumer, [TopicPartition(self._topic, part, start) for part, start in sorted(starts.items())])
            self._reached, self._ahead = starts, {}
        self._resume()
        self._next = others

    def _resume(self) -> None:
        if self._paused:
            self._consumer.resume([TopicPartition(self._topic, part) for part in self._paused])
            self._paused = set()

    def _take_ahead(self, partition: int, end: int) -> list[Message]:
        ahead = self._ahead.pop(partition, [])
        taken = sum(_offset(one) < end for one in ahead)
        if taken < len(ahead):
            self._ahead[partition] = ahead[taken:]
        return ahead[:taken]

    def _sorted_out(self, messages: list[Message], ends: Mapping[int, int]) -> list[Message]:
        """Those of the messages that are in a range; those behind it are kept."""
        if events := [one for one in messages if one.error() is not None]:
            for event in events:
                self._event(event, ends)
            messages = [one for one in messages if one.error() is None]
        partitions = np.fromiter((one.partition() for one in messages), np.int64, len(messages))
        offsets = np.fromiter((one.offset() for one in messages), np.int64, len(messages))
        limits = np.zeros(1 + max(self._reached), np.int64)
        limits[list(ends)] = list(ends.values())
        for partition in np.unique(partitions).tolist():
            last = 1 + int(offsets[partitions == partition][-1])
            self._reached[partition] = max(self._reached.get(partition, 0), last)  # the end may have been seen before
        inside = offsets < limits[partitions]
        if inside.all():
            return messages
        for place in np.flatnonzero(~inside).tolist():
            self._ahead.setdefault(int(partitions[place]), []).append(messages[place])
        waiting = self._ahead.items() if len(self._ahead) > len(self._paused) else ()
        full = {part for part, ahead in waiting if len(ahead) >= CHUNK_RECORDS or sum(map(len, ahead)) >= CHUNK_BYTES}
        if full := full - self._paused:
            self._consumer.pause([TopicPartition(self._topic, part) for part in full])
            self._paused |= full
        return [messages[place] for place in np.flatnonzero(inside).tolist()]

    def _event(self, event: Message, ends: Mapping[int, int]) -> None:
        error, partition = event.error(), event.partition()
        assert error is not None
        if error.code() == KafkaError._PARTITION_EOF:
            assert partition is not None
            self._reached[partition] = max(self._reached.get(partition, 0), _offset(event))
        elif partition is not None and partition >= 0 and partition not in ends and not passes(error):
            self._next.pop(partition, None)  # begun anew when it is to be read
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and _offset(event) < self._began.get(partition or 0, 0):
            pass  # of an earlier assignment
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise BrokerUnavailable(
                f"reading {self._topic}:{partition}: {error.str()}",
                "If records were deleted meanwhile, start again to see which; else look at the broker",
            )
        elif error.code() == KafkaError._UNKNOWN_PARTITION:  # just added, and not known to every broker
            raise BrokerUnavailable(f"reading {self._topic}:{partition}: {error.str()}", "Nothing was committed")
        elif not passes(error):
            raise broker_error(error, f"reading {self._topic}")


def _offset(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset


def _headers(pairs: Any) -> list[dict[str, Any]]:
    return [{"key": name, "value": value} for name, value in pairs or ()]

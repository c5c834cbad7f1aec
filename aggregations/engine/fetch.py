"""Reads ranges of a topic's partitions, with a consumer that stays and fetches ahead from one range to the next."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException

from aggregations.columns.arrays import Mask, arrow, binary, numbers
from aggregations.engine.clients import NEEDED, UNUSED_SECONDS, name_of, once, opened
from aggregations.engine.idle import keepers
from aggregations.engine.message_objects import Client, Event, Objects
from aggregations.engine.ranges import Range
from aggregations.engine.retry import StoppedError
from persistence.kafka import BrokerUnavailable, KafkaSettings, librdkafka
from persistence.kafka.errors import broker_error, passes

CHUNK_RECORDS = 50_000
"""Most records that are taken at a time, and about as many are decoded together: from a half to one and a half times.
Measured: 10,000 cost a third more, 100,000 a little more."""
CHUNK_BYTES = 64 << 20
"""Bytes of keys, values and headers after which a chunk is complete."""
AHEAD_BYTES = 128 << 20
"""Bytes of records behind their ranges, of all partitions together, from which on their partitions are paused.

A paused partition loses what the client has fetched of it, which is fetched again. Measured: with a pause from 50,000
records on, half of all batches had one, and an event cost a seventh more.
"""
_SILENCE_SECONDS = 30.0
"""Longest time without progress, in seconds, before the broker counts as unavailable."""
_TURN_SECONDS = 10.0
"""Time without progress, in seconds, after which the partitions that nothing is missing of are paused: on a slow connection,
the others may not have their turn within `_SILENCE_SECONDS` otherwise."""
_PATIENCE_SECONDS = 0.05
"""Longest time to wait for a whole chunk, in seconds."""
_CONSUMER: Final[dict[str, Any]] = {
    "check_crcs": True,
    "fetch_max_bytes": 64 << 20,
    "max_partition_fetch_bytes": 8 << 20,
    "queued_min_messages": 200_000,
    "queued_max_messages_kbytes": 128 << 10,
    "fetch_queue_backoff_ms": 20,
    "fetch_wait_max_ms": 100,  # as long as this, the end of a log is not noticed
}


class Fetcher:
    """Reads ranges of one topic. Ranges that continue where the previous ones ended are read without a seek.

    Args:
        settings: Settings of the Kafka cluster.
        topic: The topic.
        group: Consumer group named to the broker; it is neither joined nor committed to.
        headers: Read headers, too.
        compiled: Make no Python objects of messages, if that is possible: faster, once its compiled code is loaded.

    Attributes:
        used: When it was last made or read from, on the monotonic clock.
    """

    def __init__(
        self, settings: KafkaSettings, topic: str, group: str, *, headers: bool = False, compiled: bool = True
    ) -> None:
        self._topic = topic
        self.used = time.monotonic()
        given = settings.client(group_id=group, **_CONSUMER) | NEEDED
        self._open: Callable[[], Client] = partial(_client if compiled else Objects, given, headers=headers)
        try:
            self._client = self._open()
        except KafkaException as error:
            raise broker_error(error.args[0], f"setting up the consumer of {topic}") from error
        self._next: dict[int, int] = {}  # by assigned partition: where the range to read has to start
        self._reached: dict[int, int] = {}  # by assigned partition: up to here the client has delivered everything
        self._ahead: dict[int, list[pa.RecordBatch]] = {}  # what was delivered and not yet asked for
        self._ahead_bytes = 0
        self._began: dict[int, int] = {}  # by partition: start of the range that is read
        self._paused: set[int] = set()  # so much is ahead that no more of them is delivered

    def close(self) -> None:
        """Close the consumer."""
        self._client.close()

    def read(
        self, ranges: Sequence[Range], *, stays: bool, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[pa.Table]:
        """Read the ranges.

        Args:
            ranges: The ranges.
            stays: The next ranges of these partitions are read here, too: fetch ahead.
            stopped: Returns whether to stop waiting for them.

        Yields:
            Records, about `CHUNK_RECORDS` at a time, those of a partition in ascending order: columns `key`
            and `value` (binary), `topic` (dictionary of strings), `partition` (int32), `offset` (int64), `timestamp` (milliseconds),
            and, if asked for, `headers` (list of structs of `key`, string, and `value`, binary).

        Raises:
            BrokerUnavailable: The broker does not deliver them.
            BrokerRefused: This user may not read the topic.
            StoppedError: The wait was stopped.
        """
        self._position(ranges)
        ends = {one.partition: one.end for one in ranges}
        held, ready = _Chunk(), deque(batch for place in ends.items() for batch in self._take_ahead(*place))
        self._resume()
        while ready:
            if held.is_full:
                yield self._table(held)
                held = _Chunk()
            held.add(ready.popleft())
        progress, before, behind = time.monotonic(), -1, 0
        while waiting := [one for one, end in ends.items() if self._reached[one] < end]:
            if stopped():
                raise StoppedError
            if held.is_full:
                yield self._table(held)
                held = _Chunk()
            left = sum(ends[one] - self._reached[one] for one in waiting)
            # No more than is missing, or the client waits for it in vain; but twice as many more as were behind the ranges the
            # last time, and not only as many as the chunk lacks, or the few that are missing would be looked for among the
            # others one by one.
            most = min(left + 2 * behind, CHUNK_RECORDS)
            try:
                batch, events = self._client.take(most, _PATIENCE_SECONDS)
            except KafkaException as error:
                raise broker_error(error.args[0], f"reading {self._topic}") from error
            for event in events:
                self._event(event, ends)
            inside = self._sorted_out(batch, ends)
            behind = batch.num_rows - inside.num_rows
            if inside.num_rows:
                held.add(inside)
            if batch.num_rows >= most or left != before:  # with fewer there are no more, and those missing do not come
                progress, before = time.monotonic(), left
            elif (silence := time.monotonic() - progress) > _SILENCE_SECONDS:
                self._renew()
                raise BrokerUnavailable(
                    f"reading {self._topic}:{min(waiting)}: no records within {_SILENCE_SECONDS:g} s",
                    "Check the broker. The batch is retried; nothing was committed",
                )
            elif silence > _TURN_SECONDS:
                self._pause(self._reached.keys() - waiting)
        if held.batches:
            yield self._table(held)
        if stays:
            self._next |= ends
        else:
            self._next, self._reached, self._ahead = {}, {}, {}
            self._resume()  # a pause outlasts its assignment
            self._client.unassign()
        self.used = time.monotonic()

    def _renew(self) -> None:
        """Begin with a new client: this one may have forgotten all brokers; see `Topics`."""
        before, self._client = self._client, self._open()
        before.close()
        self._next, self._reached, self._ahead, self._paused = {}, {}, {}, set()

    def _table(self, chunk: "_Chunk") -> pa.Table:
        table = pa.Table.from_batches(chunk.batches)
        first, topics = arrow(np.zeros(table.num_rows, np.int32)), binary([self._topic.encode()]).view(pa.string())
        return table.append_column("topic", pa.DictionaryArray.from_arrays(first, topics))

    def _position(self, ranges: Sequence[Range]) -> None:
        """Assign partitions, unless the consumer stands where the ranges start.

        Until they are read, it stands nowhere: after a failure it is not known what was delivered.
        """
        stands = all(self._next.get(one.partition) == one.start for one in ranges)
        self._began = {one.partition: one.start for one in ranges}
        others = {one: start for one, start in self._next.items() if one not in {two.partition for two in ranges}}
        if not stands:
            starts = {**others, **{one.partition: one.start for one in ranges}}
            self._client.assign(self._topic, starts)
            self._reached, self._ahead = starts, {}
        self._next = others

    def _pause(self, partitions: Iterable[int]) -> None:
        if some := set(partitions) - self._paused:
            self._client.pause(self._topic, some)
            self._paused |= some

    def _resume(self) -> None:
        """Resume partitions, but while there is much ahead only those of which nothing is: others are not asked for.

        Else a partition that is hardly read, because it waits for others in event time, would add to it in each batch.
        """
        self._ahead_bytes = sum(one.nbytes for ahead in self._ahead.values() for one in ahead)
        if some := self._paused.difference(self._ahead if 2 * self._ahead_bytes >= AHEAD_BYTES else ()):
            self._client.resume(self._topic, some)
            self._paused -= some

    def _take_ahead(self, partition: int, end: int) -> Iterator[pa.RecordBatch]:
        ahead = self._ahead.pop(partition, [])
        for place, batch in enumerate(ahead):
            inside = int(np.searchsorted(numbers(batch.column("offset"), np.int64), end))
            if inside:
                yield batch.slice(0, inside)
            if inside < batch.num_rows:
                self._ahead[partition] = [batch.slice(inside), *ahead[place + 1 :]]
                return

    def _sorted_out(self, batch: pa.RecordBatch, ends: Mapping[int, int]) -> pa.RecordBatch:
        """The records of the batch that are in a range; those behind it are kept."""
        partitions = numbers(batch.column("partition"), np.int32)
        offsets = numbers(batch.column("offset"), np.int64)
        limits = np.zeros(1 + max(self._reached), np.int64)
        limits[list(ends)] = list(ends.values())
        found = np.flatnonzero(np.bincount(partitions)).tolist()
        for partition in found:
            last = 1 + int(offsets[partitions == partition][-1])
            self._reached[partition] = max(self._reached.get(partition, 0), last)  # the end may have been seen before
        inside = offsets < limits[partitions]
        if inside.all():
            return batch
        for partition in found:
            behind = ~inside & (partitions == partition)
            if behind.any():
                self._keep(partition, _filtered(batch, behind))
        if self._ahead_bytes >= AHEAD_BYTES:
            self._pause(self._ahead)
        return _filtered(batch, inside)

    def _keep(self, partition: int, behind: pa.RecordBatch) -> None:
        self._ahead.setdefault(partition, []).append(behind)
        self._ahead_bytes += behind.nbytes

    def _event(self, event: Event, ends: Mapping[int, int]) -> None:
        error, partition, offset = event
        if error.code() == KafkaError._PARTITION_EOF:
            assert partition is not None
            assert offset is not None
            self._reached[partition] = max(self._reached.get(partition, 0), offset)
        elif partition is not None and partition >= 0 and partition not in ends and not passes(error):
            self._next.pop(partition, None)  # begun anew when it is to be read
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and (offset or 0) < self._began.get(partition or 0, 0):
            pass  # of an earlier assignment
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise BrokerUnavailable(
                f"reading {self._topic}:{partition}: {error.str()}",
                "If records were deleted in the meantime, start the run again to see which ones; otherwise check the broker",
            )
        elif error.code() == KafkaError._UNKNOWN_PARTITION:  # just added, and not known to every broker
            raise BrokerUnavailable(f"reading {self._topic}:{partition}: {error.str()}", "Nothing was committed")
        elif not passes(error):
            raise broker_error(error, f"reading {self._topic}")


def _client(settings: dict[str, Any], *, headers: bool) -> Client:
    """A consumer: one that makes no Python objects of messages, if that is possible."""
    from aggregations.engine import consuming  # its compiled code is for processes that read only

    if librdkafka.is_known():
        return consuming.Pointers(settings, CHUNK_BYTES, headers=headers)
    return Objects(settings, headers=headers)


class _Chunk:
    """Records that are decoded together."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)
        self._rows += batch.num_rows
        self._bytes += batch.nbytes

    @property
    def is_full(self) -> bool:
        return 2 * self._rows >= CHUNK_RECORDS or self._bytes >= CHUNK_BYTES


def _filtered(batch: pa.RecordBatch, mask: Mask) -> pa.RecordBatch:
    """Some rows; not copied if they are neighbours and most bytes of the batch, which then stays in memory with them."""
    count, first = int(np.count_nonzero(mask)), int(np.argmax(mask))
    if mask[first : first + count].all() and 2 * (part := batch.slice(first, count)).nbytes >= batch.nbytes:
        return part
    return batch.filter(arrow(mask))


def fetcher_of(settings: KafkaSettings, topic: str, group: str, *, headers: bool) -> Fetcher:
    """This process's consumer of a topic."""
    return once(
        ("fetcher", name_of(settings), topic, group, headers), lambda: Fetcher(settings, topic, group, headers=headers)
    )


def _close_unused() -> bool:
    for place, found in list(opened.items()):
        if isinstance(found, Fetcher) and time.monotonic() - found.used > UNUSED_SECONDS:
            del opened[place]
            found.close()
    return False


keepers.append(_close_unused)

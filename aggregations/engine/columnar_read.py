"""Reads Kafka's records into columns: a decoder for each source, and what is checked before the first step."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa

from aggregations.columns import schema
from aggregations.columns.batch import RejectedRow
from aggregations.columns.decode import Decoder
from aggregations.columns.first import Unread, may_be_copies, unread_may_be_copies
from aggregations.columns.record_columns import with_record_columns
from aggregations.columns.times import with_times
from aggregations.definition.source import Topic
from aggregations.definition.system import SYSTEM_COLUMNS
from aggregations.engine.path import Work
from aggregations.engine.roots import is_beyond
from aggregations.engine.rows import Rows, by_partition, together
from aggregations.per_message.dead_letters import BEYOND_END
from aggregations.per_message.ledger import Reading, highest
from envelope import EnvelopeError, Lineage, Reason
from envelope.limits import MAX_EPOCH, OFFSET_BITS

_NO_END: Final = (1 << OFFSET_BITS, MAX_EPOCH)


def read_topics(work: Work, chunks: Iterable[pa.Table]) -> list[Rows]:
    """The readable records of every source, in the order of the flow's inputs.

    Args:
        work: Context of the task.
        chunks: The records, each table of one topic; see `aggregations.engine.fetch.Fetcher.read`.
    """
    flow = work.job.flow
    readers = {name: _Reader(work, topic) for name, topic in flow.topics.items()}
    for table in chunks:
        readers[flow.source_of(table.column("topic")[0].as_py()).name].add(table)
    return [reader.rows() for reader in readers.values()]


@dataclass
class _Reader:
    """Reads the records of one source."""

    work: Work
    topic: Topic
    parts: list[Rows] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)

    def __post_init__(self) -> None:
        flow = self.work.job.flow
        self._is_timed = flow.is_timed
        self._decoder = Decoder(
            *(self.topic, self.work.roots.topic_ids, flow.columns),
            timed=self._is_timed,
            stamps=flow.reads_stamps,
            own_id=self.work.job.progress.own_id,
        )

    def add(self, table: pa.Table) -> None:
        work = self.work
        with work.timed("decode"):
            batch = self._decoder.decode(table)
            work.report.counts.records += table.num_rows
            work.report.counts.tombstones += batch.skipped
            self.unread += [_unread(work, table, one) for one in batch.rejected]
            frame = with_record_columns(batch, table, work.job.flow, self.topic)
            frame.drop_in_place(schema.ROW)
            self.parts.append(_existing(work, Rows(frame, list(batch.signatures))))

    def rows(self) -> Rows:
        with self.work.timed("decode"):
            whole = by_partition(together(self.parts, self._empty()))
        with self.work.timed("steps"):
            if self._is_timed:
                frame, times = with_times(whole.frame, self.topic, self.work.job.progress.times)
                self.work.collector.changes.times |= times
                whole = Rows(frame, whole.signatures)
            return _first_deliveries(self.work, whole, self.unread)

    def _empty(self) -> pl.DataFrame:
        lists = {name: SYSTEM_COLUMNS[name] for name in sorted(self.work.job.flow.system_lists)}
        times = {schema.TIME: pl.Int64()} if self._is_timed else {}
        position = {schema.position(0): pl.Int64()}
        columns = {**self._decoder.schema, **schema.SYSTEM, **times, **position, **lists}
        return pl.DataFrame(schema=columns).drop(schema.ROW)


def _unread(work: Work, table: pa.Table, rejection: RejectedRow) -> Unread:
    own = work.job.node(*(table.column(name)[rejection.row].as_py() for name in ("topic", "partition", "offset")))
    lineage = Lineage.of(rejection.error.chain or (), own).resolved(work.roots.topic_ids)
    return Unread(own, table.column("key")[rejection.row].as_py(), rejection.error, lineage)


def _first_deliveries(work: Work, rows: Rows, unread: Sequence[Unread]) -> Rows:
    """Mark rows that may be copies, and collect records that could not be read."""
    seen, doubt = work.job.progress.ledger.seen, work.job.attempt.doubt
    again, read = may_be_copies(rows.frame, rows.signatures, seen, doubt)
    reading = Reading(seen, doubt)
    copies = unread_may_be_copies(unread, rows.frame, rows.signatures, reading, again) if unread else []
    for one, copy in zip(unread, copies, strict=True):
        work.collector.unread(one.own, one.error, again=copy)
    changes = work.collector.changes
    changes.seen = highest(changes.seen, highest(read, reading.read))
    if not again.any():
        return rows
    return Rows(rows.frame.with_columns(pl.Series(schema.AGAIN, again)), rows.signatures)


def _existing(work: Work, rows: Rows) -> Rows:
    """Reject the rows whose root is beyond the end of its topic."""
    ends = [
        work.roots.end(one.topic, one.topic_id, one.partition, one.cluster) if one.chained else None
        for one in rows.signatures
    ]
    if not rows.frame.height or all(end is None for end in ends):
        return rows
    limits = np.array([_NO_END if end is None else end for end in ends], np.int64)
    codes = rows.frame.get_column(schema.SIGNATURE).to_numpy()
    beyond = is_beyond(rows.frame.get_column(schema.position(0)).to_numpy(), *limits[codes].T)
    if not beyond.any():
        return rows
    for place in rows.frame.filter(pl.Series(beyond)).select(schema.TOPIC, schema.PARTITION, schema.OFFSET).iter_rows():
        work.collector.unread(work.job.node(*place), EnvelopeError(Reason.ROOT_BEYOND_END, BEYOND_END))
    return Rows(rows.frame.filter(~pl.Series(beyond)), rows.signatures)

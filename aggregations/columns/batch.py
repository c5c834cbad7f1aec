"""A batch of records as columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from aggregations.columns import schema
from aggregations.columns.arrays import Ints
from aggregations.columns.signature import Signature
from aggregations.definition.element import Record
from envelope import EnvelopeError, Route, Siblings, Standing
from envelope.dedup.lineage import Redriven
from envelope.times import MAX_TIMESTAMP_MS


class RejectedRow(NamedTuple):
    """A rejected record.

    Attributes:
        row: Its row in the input.
        error: The reason, with the chain if it could be read.
    """

    row: int
    error: EnvelopeError


@dataclass(frozen=True, slots=True)
class Inputs:
    """Kafka's columns of a batch, contiguous in memory."""

    key: pa.BinaryArray
    value: pa.BinaryArray
    topic: pa.DictionaryArray
    partition: Ints
    offset: Ints
    timestamp_ms: Ints

    @classmethod
    def of(cls, records: pa.RecordBatch | pa.Table) -> "Inputs":
        """Read the columns of `Decoder.decode`; others are ignored."""
        stamp = _array(records.column("timestamp"))
        if pa.types.is_timestamp(stamp.type):
            stamp = pc.cast(stamp, pa.timestamp("ms", tz=stamp.type.tz), safe=False)
        return cls(
            key=_array(records.column("key"), pa.binary()),
            value=_array(records.column("value"), pa.binary()),
            topic=_encoded(_array(records.column("topic"))),
            partition=_numbers(records.column("partition")),
            offset=_numbers(records.column("offset")),
            timestamp_ms=_numbers(pc.fill_null(stamp.cast(pa.int64()), -1)),
        )

    def record(self, row: int) -> Record:
        """One row as a record, without headers."""
        return Record(
            topic=self.topic[row].as_py(),
            partition=int(self.partition[row]),
            offset=int(self.offset[row]),
            key=self.key[row].as_py(),
            value=self.value[row].as_py(),
            timestamp_ms=int(self.timestamp_ms[row]),
        )


def microseconds(times_ms: Ints) -> Ints:
    """Milliseconds as microseconds, clamped to 64 bits: `envelope.times.micros_of` of each."""
    return np.clip(times_ms, -MAX_TIMESTAMP_MS, MAX_TIMESTAMP_MS) * 1000


@dataclass(frozen=True, slots=True)
class Batch:
    """The readable records of a batch.

    Attributes:
        frame: One row per record, in order of arrival: the payload's columns, then those of
            `schema.SYSTEM`, then the position: `_p0`, `_p1`, …
        signatures: By the codes of column `_signature`.
        rejected: The records that are not in `frame`, by row.
        siblings: The source's policy, which determines whether event ids are part of positions.
        skipped: Number of skipped tombstones, neither in `frame` nor rejected.
    """

    frame: pl.DataFrame
    signatures: Sequence[Signature]
    rejected: Sequence[RejectedRow]
    siblings: Siblings = Siblings.EVENT_ID
    skipped: int = 0

    @property
    def positions(self) -> list[Ints]:
        """Position components by row; `schema.MISSING` where a position is shorter."""
        return position_arrays(self.frame)

    def standing(self, row: int, *, rekeyed: bool) -> Standing:
        """The standing of the message in row `row` of `frame`, as in the pure code before the ledger is consulted."""
        named = self.frame.row(row, named=True)
        return standing(named, self.signatures, rekeyed=rekeyed, siblings=self.siblings)


def position_arrays(frame: pl.DataFrame) -> list[Ints]:
    """Position components by row; `schema.MISSING` where a position is shorter."""
    arrays: list[Ints] = []
    while (name := schema.position(len(arrays))) in frame.columns:
        arrays.append(frame.get_column(name).fill_null(schema.MISSING).to_numpy())
    return arrays


def positions_at_stage(frame: pl.DataFrame, signatures: Sequence[Signature]) -> list[Ints]:
    """As `position_arrays`, with the indices of flat-maps: they follow the components of each row's own record."""
    arrays, items = position_arrays(frame), schema.item_columns(frame.columns)
    if not items:
        return arrays
    widths = np.array([one.width for one in signatures], np.int64)[frame.get_column(schema.SIGNATURE).to_numpy()]
    whole = np.full((max(len(arrays), int(widths.max(initial=1)) + len(items)), frame.height), schema.MISSING, np.int64)
    whole[: len(arrays)] = arrays
    for name in items:
        indices = frame.get_column(name)
        rows = np.flatnonzero(indices.is_not_null().to_numpy())
        whole[widths[rows], rows] = indices.drop_nulls().to_numpy()
        widths[rows] += 1
    return list(whole)


def indices_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    """The index of a row in each flat-map that it went through."""
    return tuple(row[name] for name in schema.item_columns(row) if row[name] is not None)


def standing(
    row: Mapping[str, Any],
    signatures: Sequence[Signature],
    *,
    rekeyed: bool,
    siblings: Siblings = Siblings.EVENT_ID,
) -> Standing:
    """Return the standing of a row, given by its system and position columns, before the ledger is consulted."""
    signature = signatures[row[schema.SIGNATURE]]
    place = signature.place(rekeyed=rekeyed, keyless=row[schema.KEY] is None)
    position = tuple(row[schema.position(component)] for component in range(signature.width)) + indices_of(row)
    event_id = row[schema.EVENT_ID] if siblings is Siblings.EVENT_ID else ""
    if signature.missing and event_id:
        position = (*position, event_id)
    late = row.get(schema.LATE)
    route = Route(late) if late else signature.route
    return Standing(place.lane, place.group, position, route, signature.missing and not event_id, place.wide)


def redriven(row: Mapping[str, Any], signatures: Sequence[Signature]) -> Redriven | None:
    """How the record of a row was redriven from the dead-letter topic; None if it was not."""
    signature = signatures[row[schema.SIGNATURE]]
    back = signature.back
    return None if back is None else back._replace(offset=row[schema.position(signature.width)])


def _array(column: pa.Array | pa.ChunkedArray, kind: pa.DataType | None = None) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    return column if kind is None or column.type == kind else column.cast(kind)


def _encoded(column: pa.Array) -> pa.DictionaryArray:
    return column if pa.types.is_dictionary(column.type) else column.cast(pa.string()).dictionary_encode()


def _numbers(column: pa.Array | pa.ChunkedArray) -> Ints:
    return np.asarray(_array(column).to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)

"""The fast reader of a `Topic`: converts batches of Kafka records to columns.

Compiled code (`envelope_reading`) checks every rule of `RecordDecoder` and reads what is plainly valid. Any other record goes
through `RecordDecoder` itself, which accepts or rejects it, so the two readers cannot disagree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from aggregations.columns import schema
from aggregations.columns.arrays import Ints, Mask, Spans, arrow
from aggregations.columns.batch import Batch, Inputs, RejectedRow, microseconds
from aggregations.columns.hops import Hops, Own, Routes
from aggregations.columns.payload import payload_columns
from aggregations.columns.signature import Signature, Signatures, Way, way_of
from aggregations.definition.payloads import Protobuf
from aggregations.definition.source import Decoded, RecordDecoder, Topic
from envelope import EnvelopeError, Tombstones
from envelope.codec import HEAD
from envelope.dedup.lineage import NO_INDEX
from envelope.filters.producers import Stamp
from envelope.limits import root_number

_MOST_HOPS: Final = 1024
"""Hops of a chain that compiled code reads; a longer one is read by `RecordDecoder`."""

_NAMELESS: Final = pl.Series([""], dtype=pl.String)


@dataclass(slots=True)
class _Part:
    """Some rows of a batch after reading.

    Attributes:
        rows: Their numbers in the input, ascending.
        columns: The payload's columns.
        event_time_us: Event times.
        event_id: Event ids.
        codes: Signature of every row.
        positions: Position components; `MISSING` where a position is shorter.
        time_us: `Decoded.time_us`, Int64; None if it is not needed.
        stamps: `Decoded.stamp`, as `schema.STAMP`; None if it is not needed.
        tombstones: The rows are tombstones, whose columns are null.
    """

    rows: Ints
    columns: pl.DataFrame
    event_time_us: Ints
    event_id: pl.Series
    codes: Ints
    positions: list[Ints]
    time_us: pl.Series | None
    stamps: pl.Series | None
    tombstones: bool = False


@dataclass(slots=True)
class _Codes:
    """The numbered signatures of one batch."""

    known: Signatures
    numbers: dict[Way, int] = field(default_factory=dict)
    signatures: list[Signature] = field(default_factory=list)

    def of(self, route: Way) -> int:
        """Number of a route's signature; -1 for a loop."""
        if route not in self.numbers:
            signature = self.known.of(route)
            self.numbers[route] = -1 if signature is None else len(self.signatures)
            if signature is not None:
                self.signatures.append(signature)
        return self.numbers[route]


class Decoder:
    """Reads batches of one topic's records.

    Args:
        topic: The source.
        topic_ids: Current topic id by topic, for roots without a topic id.
        columns: The payload columns needed; None for all.
        timed: Add the column `schema.TIME`.
        stamps: Add the column `schema.STAMP`.
        own_id: As for `Signatures`.
    """

    def __init__(
        self,
        topic: Topic,
        topic_ids: Mapping[str, str] | None = None,
        columns: frozenset[str] | None = None,
        *,
        timed: bool = False,
        stamps: bool = False,
        own_id: Callable[[str, int], str] = lambda _topic, _partition: "",
    ) -> None:
        self.topic = topic
        self._timed = timed
        self._stamps = stamps
        self.schema = {name: kind for name, kind in topic.schema.items() if columns is None or name in columns}
        payload_type = topic.payload.type if isinstance(topic.payload, Protobuf) else None
        self._payload_type = np.frombuffer((payload_type.full_name if payload_type else "").encode(), np.uint8)
        self._one = RecordDecoder(topic, columns, stamps=stamps)
        self._payloads = payload_columns(topic.payload, columns)
        self._signatures = Signatures({} if topic_ids is None else topic_ids, topic.cluster, topic.retries, own_id)

    def decode(self, records: pa.RecordBatch | pa.Table) -> Batch:
        """Read a batch.

        Args:
            records: Columns `key` and `value` (binary), `topic` (string), `partition` (int32), `offset` (int64)
                and `timestamp` (timestamp, or int64 milliseconds), in order of arrival. The topics may be a dictionary.

        Returns:
            The columns of the records that `RecordDecoder` would accept, and its errors for the others.
        """
        inputs = Inputs.of(records)
        codes = _Codes(self._signatures)
        parts = [self._enveloped(inputs, codes) if self.topic.envelope else self._bare(inputs, codes)]
        rejected: list[RejectedRow] = []
        apart = 0 if self.topic.tombstones is Tombstones.DEAD_LETTER else inputs.value.null_count
        if len(parts[0].rows) + apart < len(inputs.value):
            left = np.setdiff1d(np.arange(len(inputs.value)), parts[0].rows, assume_unique=True)
            if apart:
                left = left[inputs.value.is_valid().to_numpy(zero_copy_only=False)[left]]
            parts.append(self._one_by_one(inputs, left, codes, rejected))
        skipped = apart if self.topic.tombstones is Tombstones.SKIP else 0
        if apart > skipped:
            parts.append(self._tombstones(inputs, codes))
        frames = [_frame(part, inputs, codes.signatures) for part in parts if len(part.rows) or part is parts[0]]
        frame = frames[0] if len(frames) == 1 else pl.concat(frames, how="diagonal").sort(schema.ROW)
        return Batch(frame, tuple(codes.signatures), rejected, self.topic.siblings, skipped)

    def _enveloped(self, inputs: Inputs, codes: _Codes) -> _Part:
        from aggregations.columns.envelope_reading import read_envelopes

        limits, own = self.topic.limits, Own.of(inputs.topic, inputs.partition)
        values = Spans.of(inputs.value)
        good = np.empty(len(inputs.value), np.bool_)
        found = np.empty((17 if self._stamps else 9, len(good)), np.int64)
        most = (limits.message_bytes, limits.payload_bytes, min(limits.hops, _MOST_HOPS), limits.topic_chars)
        offsets, epochs, indices, kinds, nodes = read_envelopes(
            tuple(values),
            tuple(Spans.of(inputs.key)),
            tuple(Spans.of(own.names())),
            own.codes,
            self._payload_type,
            np.array(most, np.int64),
            good,
            found,
        )
        rows = np.flatnonzero(good)
        if len(rows) < len(good):
            found = found.take(rows, axis=1)
        payload, name, (time, timed), (first, count, route) = found[:2], found[2:4], found[4:6], found[6:9]
        own_ms = _of(inputs.timestamp_ms, rows)
        return self._part(
            rows,
            Hops(first, count, offsets, epochs, indices),
            Routes(own, nodes, kinds, values.data).way,
            route,
            Spans(values.data, *payload),
            np.where(timed == 1, time, microseconds(np.where(timed == 2, time, own_ms))),
            # The timestamp of another record than the root is no event time.
            (timed != 0) | ((count == 0) & (own_ms >= 0)),
            _texts(Spans(values.data, *name)),
            _stamps(values.data, found[9:]) if self._stamps else None,
            inputs,
            codes,
        )

    def _bare(self, inputs: Inputs, codes: _Codes) -> _Part:
        values = Spans.of(inputs.value)
        usual = (values.lengths > 0) & (values.lengths <= self.topic.limits.payload_bytes)
        usual &= ~_begins(values, HEAD)  # possibly redriven: the other reader decides
        rows = np.flatnonzero(usual)
        return self._plain(rows, values.at(rows), inputs, codes)

    def _tombstones(self, inputs: Inputs, codes: _Codes) -> _Part:
        rows = np.flatnonzero(inputs.value.is_null().to_numpy(zero_copy_only=False))
        return self._plain(rows, None, inputs, codes)

    def _plain(self, rows: Ints, payloads: Spans | None, inputs: Inputs, codes: _Codes) -> _Part:
        """Records without an envelope, which are their own roots."""
        own = Own.of(inputs.topic, inputs.partition)
        nameless = _NAMELESS.new_from_index(0, len(rows))
        times = microseconds(_of(inputs.timestamp_ms, rows))
        hops = Hops.none(len(rows))
        stamps = pl.repeat(None, len(rows), eager=True, dtype=schema.STAMPS) if self._stamps else None
        return self._part(
            rows, hops, own.way, _of(own.codes, rows), payloads, times, times >= 0, nameless, stamps, inputs, codes
        )

    def _part(
        self,
        rows: Ints,
        hops: Hops,
        way: Callable[[int], Way],
        routes: Ints,
        payloads: Spans | None,
        event_time_us: Ints,
        timed: Mask,
        event_id: pl.Series,
        stamps: pl.Series | None,
        inputs: Inputs,
        codes: _Codes,
    ) -> _Part:
        """Combine the rows that can be read and are not part of a loop. `payloads` is None for tombstones."""
        if payloads is None:
            columns, read = pl.DataFrame(schema=self.schema).clear(len(rows)), np.ones(len(rows), np.bool_)
        else:
            columns, read = self._payloads(payloads)
        firsts = np.full(int(routes.max(initial=-1)) + 1, len(routes))
        firsts[routes[::-1]] = np.arange(len(routes))[::-1]
        numbers = np.empty(len(firsts), np.int64)
        for row in np.sort(firsts[firsts < len(routes)]).tolist():  # in order of first appearance
            numbers[routes[row]] = codes.of(way(int(routes[row])))
        signature_codes = numbers[routes]
        positions = _positions(hops, signature_codes, codes.signatures, _of(inputs.offset, rows))
        time_us = _series(arrow(event_time_us, timed)) if self._timed else None
        part = _Part(
            *(rows, columns, event_time_us, event_id, signature_codes, positions, time_us, stamps),
            tombstones=payloads is None,
        )
        placed = signature_codes >= 0
        return part if read.all() and placed.all() else _without(part, read, placed)

    def _one_by_one(self, inputs: Inputs, rows: Ints, codes: _Codes, rejected: list[RejectedRow]) -> _Part:
        read: list[tuple[int, Decoded]] = []
        for row in rows.tolist():
            try:
                read.append((row, self._one.decode(inputs.record(row))))
            except EnvelopeError as error:
                rejected.append(RejectedRow(row, error))
        positions = [_position(one) for _, one in read]
        width = max(map(len, positions), default=1)
        # Without a value a record reaches this point only to be rejected, so each that was read has columns.
        columns = {name: [one.columns[name] for _, one in read if one.columns is not None] for name in self.schema}
        return _Part(
            rows=np.array([row for row, _ in read], np.int64),
            columns=pl.DataFrame(columns, schema=self.schema) if columns else pl.DataFrame(height=len(read)),
            event_time_us=np.array([one.event_time_us for _, one in read], np.int64),
            event_id=pl.Series([one.event_id for _, one in read], dtype=pl.String),
            codes=np.array([codes.of(way_of(one.chain, one.lineage.own)) for _, one in read], np.int64),
            positions=[
                np.array([one[i] if i < len(one) else schema.MISSING for one in positions], np.int64)
                for i in range(width)
            ],
            time_us=pl.Series([one.time_us for _, one in read], dtype=pl.Int64) if self._timed else None,
            stamps=_given([one.stamp for _, one in read]) if self._stamps else None,
        )


def _frame(part: _Part, inputs: Inputs, signatures: Sequence[Signature]) -> pl.DataFrame:
    exotic = np.array([signature.exotic for signature in signatures], np.bool_)
    system = [
        pl.Series(schema.ROW, part.rows.astype(np.uint32)),
        _topics(inputs.topic, part.rows).alias(schema.TOPIC),
        pl.Series(schema.PARTITION, _of(inputs.partition, part.rows).astype(np.int32)),
        pl.Series(schema.OFFSET, _of(inputs.offset, part.rows)),
        _series(_taken(inputs.key, part.rows)).alias(schema.KEY),
        pl.Series(schema.TIMESTAMP, _of(inputs.timestamp_ms, part.rows)),
        pl.Series(schema.EVENT_TIME, part.event_time_us),
        part.event_id.alias(schema.EVENT_ID),
        pl.Series(schema.SIGNATURE, part.codes.astype(np.uint32)),
        pl.Series(schema.EXOTIC, exotic[part.codes]),
    ]
    if part.time_us is not None:
        system.append(part.time_us.alias(schema.TIME))
    if part.stamps is not None:
        system.append(part.stamps.alias(schema.STAMP))
    if part.tombstones:
        system.append(pl.repeat(value=True, n=len(part.rows), eager=True).alias(schema.TOMBSTONE))
    for component, values in enumerate(part.positions):
        short = values == schema.MISSING
        system.append(_series(arrow(values, ~short)).alias(schema.position(component)))
    return pl.DataFrame([*part.columns.get_columns(), *system])


def _positions(hops: Hops, codes: Ints, signatures: Sequence[Signature], own_offsets: Ints) -> list[Ints]:
    """Position components by row; a loop has only its root."""
    positions = [hops.root_numbers(own_offsets)]
    # The last entry is for the code of a loop: -1.
    widths = np.array([*(0 if one.pass_through else one.width for one in signatures), 0])[codes]
    for component in range(1, max((signature.components for signature in signatures), default=1)):
        values = np.full(len(codes), schema.MISSING, np.int64)
        rows = np.flatnonzero(widths > component)
        values[rows] = hops.indices_at(component - 1, rows)
        positions.append(values)
    for code, signature in enumerate(signatures):
        if signature.pass_through:
            rows = np.flatnonzero(codes == code)
            for component, edge in enumerate(signature.edges, start=1):
                positions[component][rows] = hops.indices_at(edge, rows)
            if signature.back is not None:
                positions[signature.width][rows] = hops.offsets_at(signature.died, rows)
    return positions


def _position(one: Decoded) -> list[int]:
    line = one.lineage.reduced()
    root = root_number(line.root.offset, line.root.leader_epoch)
    position = [root, *(NO_INDEX if edge.index is None else edge.index for edge in line.edges)]
    back = one.lineage.redriven
    return position if back is None else [*position, back.offset]


def _without(part: _Part, payload_read: Mask, placed: Mask) -> _Part:
    """Drop the rows whose payload could not be read, which have no columns, and the rows without a place."""
    kept = payload_read & placed
    return _Part(
        rows=part.rows[kept],
        columns=part.columns.filter(pl.Series(placed[payload_read])),
        event_time_us=part.event_time_us[kept],
        event_id=part.event_id.filter(pl.Series(kept)),
        codes=part.codes[kept],
        positions=[values[kept] for values in part.positions],
        time_us=None if part.time_us is None else part.time_us.filter(pl.Series(kept)),
        stamps=None if part.stamps is None else part.stamps.filter(pl.Series(kept)),
    )


def _of(values: Ints, rows: Ints) -> Ints:
    """The values of some rows, in ascending order of rows; not copied if these are all rows."""
    return values if len(rows) == len(values) else values[rows]


def _taken(array: pa.Array, rows: Ints) -> pa.Array:
    """The values of some rows, in ascending order of rows."""
    return array if len(rows) == len(array) else array.take(arrow(rows))


def _topics(topics: pa.DictionaryArray, rows: Ints) -> pl.Series:
    if len(topics.dictionary) == 1:
        return _series(topics.dictionary).new_from_index(0, len(rows))
    return _series(_taken(topics, rows).dictionary_decode())


def _texts(spans: Spans) -> pl.Series:
    if not spans.lengths.any():
        return _NAMELESS.new_from_index(0, len(spans.lengths))
    return _series(spans.array(pa.string()))


def _stamps(data: npt.NDArray[np.uint8], found: Ints) -> pl.Series:
    """The column `schema.STAMP`; `found` has the rows of `read_envelopes` from the ninth on."""
    sequence, numbered, last, has_last, epoch, contiguous = found[2:]
    fields = (
        _texts(Spans(data, *found[:2])),
        _series(arrow(sequence)),
        _series(arrow(last, has_last.astype(np.bool_))),
        _series(arrow(epoch)),
        _series(arrow(contiguous.astype(np.bool_))),
    )
    frame = pl.DataFrame([one.alias(name) for name, one in zip(schema.STAMP_NAMES, fields, strict=True)])
    whole = pl.struct(schema.STAMP_NAMES)
    if not numbered.all():
        whole = pl.when(pl.Series(numbered.astype(np.bool_))).then(whole)
    return frame.select(whole.alias(schema.STAMP)).to_series()


def _given(stamps: Sequence[Stamp | None]) -> pl.Series:
    """Stamps as the column `schema.STAMP`."""
    rows = [None if one is None else {name: getattr(one, name) for name in schema.STAMP_NAMES} for one in stamps]
    return pl.Series(rows, dtype=schema.STAMPS)


def _begins(values: Spans, head: bytes) -> Mask:
    found = values.lengths >= len(head)
    rows = np.flatnonzero(found)
    for i, byte in enumerate(head):
        rows = rows[values.data[values.starts[rows] + i] == byte]
    found[:] = False
    found[rows] = True
    return found


def _series(array: pa.Array) -> pl.Series:
    found = pl.from_arrow(array)
    assert isinstance(found, pl.Series)
    return found

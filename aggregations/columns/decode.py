"""The fast reader of a `Topic`: converts batches of Kafka records to columns.

It accepts records by vectorised checks of every rule of `RecordDecoder`. A record that fails a check goes
through `RecordDecoder` itself, which accepts or rejects it, so the two readers cannot disagree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from ptars import HandlerPool

from aggregations.columns import schema, seal
from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.batch import Batch, Inputs, Rejection
from aggregations.columns.hops import Hops
from aggregations.columns.payload import payload_columns
from aggregations.columns.signature import Signature, Signatures, Way, way_of
from aggregations.columns.structure import Structure
from aggregations.definition.payloads import Protobuf
from aggregations.definition.protobuf import MessageType, trimmed
from aggregations.definition.source import Decoded, RecordDecoder, Topic
from envelope import FORMAT, EnvelopeError, Tombstones
from envelope import envelope_pb2 as pb
from envelope.codec import HEAD
from envelope.dedup.lineage import NO_INDEX

_ENVELOPE_COLUMNS = frozenset(
    {"format", "sealed", "event_id", "event_time_us", "key", "payload_type", "payload", "destination", "checksum"}
    | {
        f"chain.{name}"
        for name in ("topic", "partition", "offset", "via", "index", "rekeyed", "pass_through", "keyless")
    }
    | {"chain.topic_id", "chain.cluster"}
)


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
    """

    rows: Ints
    columns: pl.DataFrame
    event_time_us: Ints
    event_id: pl.Series
    codes: Ints
    positions: list[Ints]


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
    """

    def __init__(
        self, topic: Topic, topic_ids: Mapping[str, str] | None = None, columns: frozenset[str] | None = None
    ) -> None:
        self.topic = topic
        self.schema = {name: kind for name, kind in topic.schema.items() if columns is None or name in columns}
        payload_type = topic.payload.type if isinstance(topic.payload, Protobuf) else None
        self._payload_type = payload_type.full_name if payload_type else ""
        self._one = RecordDecoder(topic, columns)
        self._payloads = payload_columns(topic.payload, columns, checked=topic.envelope)
        self._signatures = Signatures({} if topic_ids is None else topic_ids, topic.cluster)
        self._structure = Structure.of_envelope(payload_type, columns)
        envelope = trimmed(MessageType.of(pb.Envelope), _ENVELOPE_COLUMNS).DESCRIPTOR
        self._envelopes = HandlerPool([envelope.file]).get_for_message(envelope)

    def decode(self, records: pa.RecordBatch | pa.Table) -> Batch:
        """Read a batch.

        Args:
            records: Columns `key` and `value` (binary), `topic` (string), `partition` (int32), `offset` (int64)
                and `timestamp` (timestamp, or int64 milliseconds), in order of arrival.

        Returns:
            The columns of the records that `RecordDecoder` would accept, and its errors for the others.
        """
        inputs = Inputs.of(records)
        codes = _Codes(self._signatures)
        parts = [self._enveloped(inputs, codes) if self.topic.envelope else self._bare(inputs, codes)]
        rejected: list[Rejection] = []
        skipped = inputs.value.null_count if self.topic.tombstones is Tombstones.SKIP else 0
        if len(parts[0].rows) + skipped < len(inputs.value):
            left = np.setdiff1d(np.arange(len(inputs.value)), parts[0].rows, assume_unique=True)
            if skipped:
                left = left[inputs.value.is_valid().to_numpy(zero_copy_only=False)[left]]
            parts.append(self._one_by_one(inputs, left, codes, rejected))
        frames = [_frame(part, inputs, codes.signatures) for part in parts if len(part.rows) or part is parts[0]]
        frame = frames[0] if len(frames) == 1 else pl.concat(frames, how="diagonal").sort(schema.ROW)
        return Batch(frame, tuple(codes.signatures), rejected, self.topic.siblings, skipped)

    def _enveloped(self, inputs: Inputs, codes: _Codes) -> _Part:
        sealed, plain = seal.intact(inputs.value, self.topic.limits.message_bytes)
        rows, values = _filtered(inputs.value, sealed | plain)
        rows, batch = self._parsed(rows, values)
        good = self._acceptable(batch, rows, inputs, plain)
        hops = Hops.of(batch.column("chain"), self.topic.limits)
        good &= hops.sound
        if not good.all():
            rows, batch = rows[good], batch.filter(pa.array(good))
            hops = Hops.of(batch.column("chain"), self.topic.limits)
        return self._part(
            rows,
            hops,
            batch.column("payload"),
            _or_else(batch.column("event_time_us"), inputs.timestamp_us[rows]),
            _series(batch.column("event_id")),
            inputs,
            codes,
        )

    def _parsed(self, rows: Ints, values: pa.BinaryArray) -> tuple[Ints, pa.RecordBatch]:
        """Parse envelopes, without the rows that the reference parser would reject."""
        try:
            # In this order: for some invalid lengths the columnar parser panics instead of raising.
            if self._structure.all_valid(values):
                return rows, self._envelopes.array_to_record_batch(values)
        except ValueError:
            pass  # the columnar parser does not say which row it was
        valid = self._structure.valid(values)
        rows, values = rows[valid], values.filter(pa.array(valid))
        try:
            return rows, self._envelopes.array_to_record_batch(values)
        except ValueError:
            # Not expected if the structure is valid; the other reader decides.
            return rows[:0], self._envelopes.array_to_record_batch(values[:0])

    def _acceptable(self, batch: pa.RecordBatch, rows: Ints, inputs: Inputs, plain: Mask) -> Mask:
        """Which of the parsed envelopes satisfy all rules except those of hops and payload."""
        good = seal.spans(batch.column("payload"))[1] <= self.topic.limits.payload_bytes
        good &= batch.column("format").to_numpy(zero_copy_only=False) == FORMAT  # the field may be repeated
        # The last bytes may look like a checksum but belong to another field.
        checksum = pc.fill_null(batch.column("checksum"), 0).to_numpy(zero_copy_only=False)
        good &= plain[rows] | (checksum == seal.stored(inputs.value)[rows])
        if plain.any():
            claims = pc.or_(batch.column("sealed"), batch.column("checksum").is_valid())
            good &= ~(plain[rows] & claims.to_numpy(zero_copy_only=False))
        written = batch.column("key")
        same = pc.fill_null(pc.equal(written, _taken(inputs.key, rows)), fill_value=False)
        good &= pc.or_(written.is_null(), same).to_numpy(zero_copy_only=False)
        good &= _empty_or(batch.column("destination"), _taken(inputs.topic, rows))
        if self._payload_type:
            good &= _empty_or(batch.column("payload_type"), self._payload_type)
        return np.asarray(good)

    def _bare(self, inputs: Inputs, codes: _Codes) -> _Part:
        lengths = seal.spans(inputs.value)[1]
        usual = (lengths > 0) & (lengths <= self.topic.limits.payload_bytes)
        usual &= ~seal.begins(inputs.value, HEAD)  # possibly redriven: the other reader decides
        rows, values = _filtered(inputs.value, usual)
        nameless = pl.repeat("", len(rows), eager=True, dtype=pl.String)
        return self._part(rows, Hops.none(len(rows)), values, inputs.timestamp_us[rows], nameless, inputs, codes)

    def _part(
        self,
        rows: Ints,
        hops: Hops,
        payloads: pa.BinaryArray,
        event_time_us: Ints,
        event_id: pl.Series,
        inputs: Inputs,
        codes: _Codes,
    ) -> _Part:
        """Combine the rows that can be read and are not part of a loop."""
        columns, read = self._payloads(payloads)
        route_codes, routes = hops.routes(_taken(inputs.topic, rows), inputs.partition[rows])
        signature_codes = np.array([codes.of(route) for route in routes], np.int64)[route_codes]
        positions = _positions(hops, signature_codes, codes.signatures, inputs.offset[rows])
        part = _Part(rows, columns, event_time_us, event_id, signature_codes, positions)
        placed = signature_codes >= 0
        return part if read.all() and placed.all() else _without(part, read, placed)

    def _one_by_one(self, inputs: Inputs, rows: Ints, codes: _Codes, rejected: list[Rejection]) -> _Part:
        read: list[tuple[int, Decoded]] = []
        for row in rows.tolist():
            try:
                read.append((row, self._one.decode(inputs.record(row))))
            except EnvelopeError as error:
                rejected.append(Rejection(row, error))
        positions = [_position(one) for _, one in read]
        width = max(map(len, positions), default=1)
        # Tombstones reach this point only as rejections: flows on columns do not process them.
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
        )


def _frame(part: _Part, inputs: Inputs, signatures: Sequence[Signature]) -> pl.DataFrame:
    exotic = np.array([signature.exotic for signature in signatures], np.bool_)
    system = [
        pl.Series(schema.ROW, part.rows.astype(np.uint32)),
        _series(_taken(inputs.topic, part.rows)).alias(schema.TOPIC),
        pl.Series(schema.PARTITION, inputs.partition[part.rows].astype(np.int32)),
        pl.Series(schema.OFFSET, inputs.offset[part.rows]),
        _series(_taken(inputs.key, part.rows)).alias(schema.KEY),
        pl.Series(schema.TIMESTAMP, inputs.timestamp_ms[part.rows]),
        pl.Series(schema.EVENT_TIME, part.event_time_us),
        part.event_id.alias(schema.EVENT_ID),
        pl.Series(schema.SIGNATURE, part.codes.astype(np.uint32)),
        pl.Series(schema.EXOTIC, exotic[part.codes]),
    ]
    for component, values in enumerate(part.positions):
        short = values == schema.MISSING
        column = pa.array(values, mask=short) if short.any() else pa.array(values)
        system.append(_series(column).alias(schema.position(component)))
    return pl.DataFrame([*part.columns.get_columns(), *system])


def _positions(hops: Hops, codes: Ints, signatures: Sequence[Signature], own_offsets: Ints) -> list[Ints]:
    """Position components by row; a loop has only its root offset."""
    positions = [hops.root_offsets(own_offsets)]
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
    position = [line.root.offset, *(NO_INDEX if edge.index is None else edge.index for edge in line.edges)]
    return position if one.lineage.redrive is None else [*position, line.own.offset]


def _filtered(values: pa.BinaryArray, mask: Mask) -> tuple[Ints, pa.BinaryArray]:
    if mask.all():
        return np.arange(len(values)), values
    return np.flatnonzero(mask), values.filter(pa.array(mask))


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
    )


def _taken(array: pa.Array, rows: Ints) -> pa.Array:
    """The values of some rows, in ascending order of rows."""
    return array if len(rows) == len(array) else array.take(pa.array(rows))


def _empty_or(texts: pa.StringArray, wanted: pa.StringArray | str) -> Mask:
    return np.asarray(pc.or_(pc.equal(texts, ""), pc.equal(texts, wanted)).to_numpy(zero_copy_only=False))


def _or_else(numbers: pa.Int64Array, default: Ints) -> Ints:
    if numbers.null_count == 0:
        return np.asarray(numbers.to_numpy())
    return np.asarray(pc.coalesce(numbers, pa.array(default)).to_numpy())


def _series(array: pa.Array) -> pl.Series:
    found = pl.from_arrow(array)
    assert isinstance(found, pl.Series)
    return found

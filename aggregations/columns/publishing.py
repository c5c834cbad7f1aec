"""Published rows as messages: what is alike in all rows is made once, and the hops of a record are copied as bytes."""

from collections.abc import Sequence
from typing import Any, Final

from aggregations.columns import schema
from aggregations.columns.batch import position_arrays
from aggregations.columns.elements import Elements, row_of
from aggregations.definition.element import Element
from aggregations.definition.expressions import key_bytes
from aggregations.definition.flow import Publish
from aggregations.per_message.publishing import (
    Marking,
    Output,
    OutputMessage,
    Publisher,
    chosen_topic,
    item_index,
    output_of,
    payload_of,
    time_to_send,
)
from aggregations.per_message.steps import called
from envelope import EnvelopeError, Node
from envelope import envelope_pb2 as pb
from envelope.codec import CHAIN_TAG, HEAD, hop_bytes, seal, varint
from envelope.limits import DEFAULT_LIMITS

_OFFSET_TAG: Final = b"\x18"
_MOST_KEPT: Final = 4096
_parse: Final = pb.Envelope.FromString


class _Irregular(Exception):
    """A row that needs the general way."""


def published(
    rows: Elements, step: Publish, marking: Marking | None, keys: Sequence[Any], topics: Sequence[Any]
) -> list[OutputMessage | EnvelopeError | None]:
    """What a publish step makes of rows: the messages of `output_of`, byte for byte; an error where it raises one.

    Args:
        rows: The rows.
        step: The step.
        marking: Marks what is published.
        keys: The key of each output.
        topics: The topic of each output, if an expression chooses it.
    """
    output = publisher(rows)(step, marking)
    return [called(output, *one) for one in zip(rows, keys, topics, strict=True)]


def publisher(rows: Elements) -> Publisher:
    """Return what makes messages of elements over these rows, and of what functions made of them.

    Rows that were redriven, retried, or folded late, and records that are not sealed envelopes, go the general way,
    as do all rows while the ledger lists outputs that are missing.
    """

    def output_for(step: Publish, marking: Marking | None) -> Output:
        general = output_of(step, marking)
        if marking is not None and not marking.is_plain:
            return general
        fast = _Fast(rows, step, marking)

        def output(element: Element[Any], key: Any, topic: Any) -> OutputMessage | None:
            try:
                return fast.output(element, key, topic)
            except Exception:  # user code may raise anything; the general way says what was wrong
                return general(element, key, topic)

        output.__qualname__ = general.__qualname__
        return output

    return output_for


class _Fast:
    """Makes the messages of rows that are published as they are."""

    def __init__(self, rows: Elements, step: Publish, marking: Marking | None) -> None:
        self._rows = rows
        self._step = step
        self._marking = marking
        frame = rows.frame
        self._positions = [
            tuple(part for part in row if part != schema.MISSING)
            for row in zip(*(one.tolist() for one in position_arrays(frame)), strict=True)
        ]
        late = frame.get_column(schema.LATE).is_not_null().to_numpy() if schema.LATE in frame.columns else False
        self._irregular = (frame.get_column(schema.EXOTIC).to_numpy() | late).tolist()
        self._around: dict[tuple[str, int, int, bool, bool], tuple[bytes, bytes]] = {}

    def output(self, element: Element[Any], key: Any, topic: Any) -> OutputMessage:
        """The message of an element.

        Raises:
            Exception: It needs the general way, which may raise an error too.
        """
        rows, step, row = self._rows, self._step, row_of(element)
        if self._irregular[row]:
            raise _Irregular
        topic = chosen_topic(step, element, topic)
        key = key_bytes(key)
        payload, content_type = payload_of(step, element)
        own, record_key, indices = rows.own(row), rows.cell(schema.KEY, row), element.indices
        chained = rows.chained(row)
        number, hops = self._hops(row) if chained else (0, b"")
        if number >= DEFAULT_LIMITS.hops or len(payload) > DEFAULT_LIMITS.payload_bytes:
            raise _Irregular
        body = pb.Envelope(
            event_id=rows.cell(schema.EVENT_ID, row) or "",
            payload=payload,
            content_type=content_type,
            destination=topic,
            event_time_us=time_to_send(rows.cell(schema.EVENT_TIME, row), rows.cell(schema.TIMESTAMP, row)),
            key=key,
        ).SerializeToString()
        keyless = key is None or (record_key is None and chained)
        hop = self._hop(own, item_index(indices), rekeyed=key != record_key, keyless=keyless)
        order = self._positions[row] + indices
        value = seal(HEAD + body + hops + hop)
        if self._marking is not None and self._marking.refused(topic, key, value):
            raise _Irregular
        return OutputMessage(topic, key, value, (), order, own, indices)

    def _hops(self, row: int) -> tuple[int, bytes]:
        """Number and bytes of the hops of the record's envelope."""
        value = self._rows.cell(schema.VALUE, row)
        if not value.startswith(HEAD):
            raise _Irregular  # framed, or not sealed
        chain = _parse(value).chain
        return len(chain), b"".join(map(hop_bytes, chain))

    def _hop(self, own: Node, index: int, *, rekeyed: bool, keyless: bool) -> bytes:
        """The hop of this flow; what comes before and after the offset is made once."""
        place = (own.topic, own.partition, index, rekeyed, keyless)
        around = self._around.get(place)
        if around is None:
            front = pb.Hop(topic=own.topic, partition=own.partition).SerializeToString()
            back = pb.Hop(
                via=self._step.name,
                index=index,
                rekeyed=rekeyed,
                keyless=keyless,
                topic_id=own.topic_id,
                cluster=own.cluster,
            ).SerializeToString()
            if len(self._around) >= _MOST_KEPT:
                self._around.clear()
            around = self._around[place] = (front + _OFFSET_TAG, back)
        body = around[0] + varint(own.offset) + around[1]
        return CHAIN_TAG + varint(len(body)) + body

"""Schema Registry's frame in front of payloads: the same on both paths, and in a republisher."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregations.columns.arrays import Spans
from aggregations.columns.payload import frame_of, payload_columns
from aggregations.definition.payloads import Json, Payload, Protobuf
from aggregations.definition.protobuf import MessageType
from envelope import EnvelopeError, HopWriter, decode
from envelope.framing import indexes_of, strip_frame
from jobs.republish import InputRecord, InputTopics, JsonPayload, Processor, Wrapping, identity
from tests.messages import Every, Leg

HEAD = b"\0\0\0\0\7"
OWN = frame_of(indexes_of(Leg.DESCRIPTOR))
LEGS = [Leg(tail="a", minutes=3).SerializeToString(), b""]
KINDS: list[tuple[Payload, Any, list[bytes]]] = [
    (
        Protobuf(MessageType.of(Leg)),
        Leg,
        [HEAD + tail + leg for tail in (b"\0", OWN, b"\2\0", b"\1\0") for leg in LEGS],
    ),
    (Json({"k": str}), JsonPayload, [HEAD + b'{"k":"a"}', HEAD + b"{}"]),
]
OTHERS = [b"", b"\0", HEAD, HEAD[:4], HEAD + b"\2\x7e" + LEGS[0], HEAD + b"\1\x08" + LEGS[0], HEAD + b"\6\0", b"\xff"]


def test_messages_are_numbered_as_in_their_file() -> None:
    names = [*Leg.DESCRIPTOR.file.message_types_by_name]
    assert indexes_of(Leg.DESCRIPTOR) == (names.index("Leg"),) != (0,)
    assert indexes_of(Every.DESCRIPTOR) == (names.index("Every"),)


@pytest.mark.parametrize(("payload", "declared", "framed"), KINDS, ids=["protobuf", "json"])
@given(data=st.data())
def test_a_frame_is_taken_off_on_both_paths(payload: Payload, declared: Any, framed: list[bytes], data: Any) -> None:
    values = data.draw(st.lists(st.sampled_from([*framed, *LEGS, *OTHERS]), max_size=6))
    read, wanted = payload.reader(None), []
    for value in values:
        try:
            wanted.append(read(value))
        except EnvelopeError:
            wanted.append(None)
    frame, good = payload_columns(payload, None)(Spans.of(pa.array(values, pa.binary())))
    assert frame.rows(named=True) == [one for one, fine in zip(wanted, good, strict=True) if fine]
    assert all(wanted[place] is not None for place in range(len(values)) if values[place] in framed)


@pytest.mark.parametrize(("payload", "declared", "framed"), KINDS, ids=["protobuf", "json"])
def test_a_republisher_takes_the_frame_off_a_declared_payload(
    payload: Payload, declared: Any, framed: list[bytes]
) -> None:
    source = InputTopics("in", Wrapping.NONE, declared)
    processor = Processor(identity, via="x", source=source, targets={"out": 1_000_000})
    for value in framed:
        (out,) = processor.process(InputRecord("in", 0, 0, b"a", value), HopWriter("in", 0, via="x"))
        assert payload.reader(None)(decode(out.value).payload) == payload.reader(None)(value)


@pytest.mark.parametrize("indexes", [(0,), (1,), (2, 0, 1), (300, 70)])
def test_a_frame_that_is_written_is_read(indexes: tuple[int, ...]) -> None:
    assert strip_frame(b"\0\0\0\0\7" + frame_of(indexes) + b"value", indexes) == b"value"

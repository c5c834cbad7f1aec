"""A batch checked as one message gives the same result as its values checked one by one."""

import pyarrow as pa
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from ptars import HandlerPool

from aggregations.columns.structure import Structure
from aggregations.definition.protobuf import MessageType, trimmed
from envelope.codec import varint
from tests.messages import Every

TYPE = MessageType.of(Every)
STRUCTURE = Structure.of_payload(TYPE, None)
MESSAGE = trimmed(TYPE).DESCRIPTOR
COLUMNAR = HandlerPool([MESSAGE.file]).get_for_message(MESSAGE)

numbers = st.sampled_from([field.number for field in Every.DESCRIPTOR.fields] + [300])
tags = st.builds(lambda number, wire: varint(number << 3 | wire), numbers, st.integers(0, 7))
bodies = st.binary(max_size=9) | st.sampled_from([b"\x00", b"\x01a", b"\x02\x08\x01"])
groups = st.builds(
    lambda start, end, body: varint(start << 3 | 3) + body + varint(end << 3 | 4),
    numbers,
    numbers,
    st.binary(max_size=3),
)
values = st.lists(st.builds(bytes.__add__, tags, bodies) | groups, max_size=3).map(b"".join)


def columnar_accepts(value: bytes) -> bool:
    try:
        COLUMNAR.array_to_record_batch(pa.array([value], pa.binary()))
    except ValueError:
        return False
    return True


@settings(max_examples=400, deadline=None)
@given(st.lists(values, min_size=1, max_size=4))
@example([b"\x0b\x14", b"\x08\x01"])  # a group that ends as another one
@example([b"\x0b", b"\x0c"])  # one that the next value would end
@example([b"\x0a", b"\x00"])  # a field that the next value would complete
def test_of_values_that_the_columnar_parser_takes_all_are_valid_if_and_only_if_each_is(found: list[bytes]) -> None:
    whole = [value for value in found if columnar_accepts(value)]
    assume(whole)
    array = pa.array(whole, pa.binary())
    assert STRUCTURE.all_valid(array) == bool(STRUCTURE.valid(array).all())

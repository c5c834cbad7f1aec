from hypothesis import given
from hypothesis import strategies as st

from envelope import Histories, History
from persistence.names import FlowRef
from persistence.record import StateRecord, decode_record, encode_record

offsets = st.integers(0, 2**63 - 2)
indices = st.integers(-1, 2**32 - 1)


@st.composite
def positions(draw, width):
    return (draw(offsets), *(draw(indices) for _ in range(width)), *draw(st.sampled_from([(), (), ("id",), ("é\n",)])))


@st.composite
def lanes(draw):
    width = draw(st.integers(0, 3))
    held = draw(st.sets(positions(width), max_size=6))
    if draw(st.booleans()):  # dense, as a lane of one busy key
        held = {(min(held, default=(0,))[0] + n, *(0,) * width) for n in range(draw(st.integers(0, 100)))}
    return History(tuple(sorted(held)), draw(st.none() | positions(width)), draw(st.just(0) | st.integers(0, 2**40)))


names = st.text(max_size=12) | st.from_regex(r"!?[ab]:[0-9]#i(>r>c(:[0-3])?){0,3}(>branch)?", fullmatch=True)


histories = st.builds(
    Histories,
    st.dictionaries(names, lanes(), max_size=12),
    st.dictionaries(st.text(max_size=12), st.frozensets(positions(1), min_size=1, max_size=4), max_size=3),
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.text(max_size=20), json_values, histories)
def test_any_record_comes_back_equal(definition, state, held):
    record = StateRecord(definition, state, held)
    assert decode_record(encode_record(record), FlowRef("f").stage("s"), b"k") == record

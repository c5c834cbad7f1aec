"""Stored states as arrays against `persistence.record`, which defines them: both ways, and for damaged text."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregations.columns.arrays import NEVER
from aggregations.columns.expiring import with_times
from aggregations.columns.histories import LaneArrays
from aggregations.columns.lane_names import LaneNames
from aggregations.columns.record_text import TEXT, WHOLE
from aggregations.columns.records import StoredStates, encoded, form_of
from envelope import Histories, History
from envelope.dedup.lanes import healed_lane
from persistence.errors import Corrupt
from persistence.names import FlowRef
from persistence.record import StateRecord, decode_record, encode_record
from persistence.seal import seal
from tests.property.test_record_properties import histories, json_values

AT = FlowRef("f").stage("s")
FIELDS = {"n": WHOLE, 'a "field"': TEXT, "é": WHOLE}
FORM = form_of("d", list(FIELDS), list(FIELDS.values()))
whole = (
    st.none() | st.integers(-(2**63) + 1, 2**63 - 1) | st.sampled_from([2**63 - 1, -(2**63) + 1, 10**18, 10**19 // 2])
)
NAMES = ["a:0#Qx1>wrap>b", "a:0#Qx1>wrap>b:3", "a:1#Qx1>wrap>b:3", "a:0#Qx1>wrap>b:4>s>c:2", 'ü"\\:7#>r>b']


@st.composite
def usual_lanes(draw: st.DrawFn) -> History:
    width = draw(st.integers(1, 3))
    offsets = st.integers(0, 2**63 - 1) | st.integers(0, 12)
    index = st.integers(0, draw(st.sampled_from([0, 1, 2**32 - 1])))
    position = st.tuples(offsets, *[index] * (width - 1))
    held = draw(st.sets(position, max_size=6))
    if draw(st.booleans()):
        first, step = draw(st.integers(0, 5)), draw(st.integers(1, 3))
        held = {(first + n * step, *(0,) * (width - 1)) for n in range(draw(st.integers(0, 130)))} | held
    floor = draw(st.none() | position)
    return History(tuple(sorted(held)), floor, draw(st.integers(0 if held else 1, 2**40)), draw(st.booleans()))


states = st.tuples(whole, json_values, whole).map(lambda values: dict(zip(FIELDS, values, strict=True)))
usual = st.dictionaries(st.sampled_from(NAMES), usual_lanes(), min_size=1).map(Histories)


@given(st.lists(st.none() | st.tuples(states, usual), max_size=4))
def test_a_usual_record_is_read_and_written_as_the_same_bytes(
    found: list[tuple[dict[str, object], Histories] | None],
) -> None:
    values = [None if one is None else encode_record(StateRecord("d", *one)) for one in found]
    names = LaneNames()
    stored = StoredStates(values, FORM, names)
    assert not stored.other.any()
    assert stored.exists.tolist() == [one is not None for one in found]
    for key, one in enumerate(found):
        if one is not None:
            assert histories_of(stored.lanes, key, names) == one[1]
            assert state_of(stored, key) == one[0]
    keys = np.flatnonzero(stored.exists)
    again = encoded(FORM, names, stored.lanes, keys, stored.values, stored.data)
    assert again == [value for value in values if value is not None]


def test_a_record_with_positions_that_were_folded_late_is_left_to_the_pure_code() -> None:
    state = {"n": 1, 'a "field"': None, "é": 2}
    for name, is_other in (("a:0#Qx1", False), (healed_lane("a:0#Qx1"), True)):
        record = encode_record(StateRecord("d", state, Histories({name: History(((1,),), used=1)})))
        assert StoredStates([record], FORM, LaneNames()).other.tolist() == [is_other]


times = st.none() | st.integers(-(2**62), 2**62) | st.sampled_from([0, -1, 10**15])


@given(st.lists(st.none() | st.tuples(states, usual, times), max_size=4))
def test_the_latest_event_time_of_a_state_is_read_and_written_too(
    found: list[tuple[dict[str, object], Histories, int | None] | None],
) -> None:
    values = [None if one is None else encode_record(StateRecord("d", *one)) for one in found]
    names = LaneNames()
    stored = StoredStates(values, FORM, names, timed=True)
    assert not stored.other.any()
    assert stored.times.tolist() == [NEVER if one is None or one[2] is None else one[2] for one in found]
    keys = np.flatnonzero(stored.times != NEVER)
    again = encoded(FORM, names, stored.lanes, keys, with_times(stored.values, stored.times), stored.data)
    assert again == [value for value, one in zip(values, found, strict=True) if one is not None and one[2] is not None]
    plain = StoredStates(values, FORM, names)
    assert plain.other.tolist() == [one is not None and one[2] is not None for one in found]


@given(states | json_values, histories | usual, st.text(max_size=2) | st.just("d"))
def test_any_record_is_read_as_it_is_or_left_to_the_reference(state: object, held: Histories, definition: str) -> None:
    check(encode_record(StateRecord(definition, state, held)))


@given(states, usual, st.data())
def test_damage_is_never_read(state: object, held: Histories, data: st.DataObject) -> None:
    value = bytearray(encode_record(StateRecord("d", state, held)))
    at = data.draw(st.integers(0, len(value) - 1), label="at")
    match data.draw(st.sampled_from(["change", "drop", "repeat", "cut", "insert"]), label="damage"):
        case "change":
            value[at] ^= data.draw(st.integers(1, 255), label="bits")
        case "drop":
            del value[at]
        case "repeat":
            value[at:at] = value[at : at + data.draw(st.integers(1, 40), label="length")]
        case "cut":
            del value[at:]
        case "insert":
            value[at:at] = data.draw(
                st.sampled_from([b"-", b"0", b",", b"]", b"[", b"}", b'"', b"1e5", b" "]), label="text"
            )
    check(bytes(value))
    body = bytes(value[:-21]) + b"}"
    check(seal(body if body[:1] == b"{" else b"{" + body))  # the checksum of the damaged text


def test_a_damaged_value_under_a_right_checksum_is_noticed_where_it_is_used() -> None:
    value = encode_record(StateRecord("d", dict.fromkeys(FIELDS), Histories({NAMES[0]: History(used=1)})))
    damaged = value[:-21].replace(b'field\\"":null', b'field\\"":ull') + b"}"
    assert len(damaged) == len(value) - 21
    check(seal(damaged))


def test_integers_beyond_63_bits_are_left_to_the_reference() -> None:
    held = Histories({NAMES[0]: History(((1, 0),), used=1)})
    for number in (2**63, -(2**63), 2**64 - 1, 10**19, 10**20):
        value = encode_record(StateRecord("d", dict.fromkeys(FIELDS) | {"n": number}, held))
        assert StoredStates([value], FORM, LaneNames()).other[0]


def test_one_long_history_takes_room_once() -> None:
    state = dict.fromkeys(FIELDS)
    short = encode_record(StateRecord("d", state, Histories({NAMES[0]: History(((1, 0),), used=1)})))
    long = Histories({NAMES[0]: History(tuple((2 * n, 0) for n in range(20_000)), used=1)})
    names = LaneNames()
    stored = StoredStates([*[short] * 100, encode_record(StateRecord("d", state, long)), short], FORM, names)
    assert not stored.other.any()
    assert histories_of(stored.lanes, 100, names) == long
    room = stored.lanes.held.base
    assert room is not None
    assert len(room) < 4 * len(stored.lanes.held)


def check(value: bytes) -> None:
    """Read a record between two others; if it is read, the reference reads the same."""
    other = encode_record(StateRecord("d", dict.fromkeys(FIELDS), Histories({NAMES[0]: History(((1, 0),), used=1)})))
    names = LaneNames()
    stored = StoredStates([other, value, other], FORM, names)
    assert stored.other.tolist() == [False, bool(stored.other[1]), False]
    if stored.other[1]:
        return
    try:
        record = decode_record(value, AT, b"k")
    except Corrupt:  # under a right checksum the text of a value is parsed where it is used
        with pytest.raises(msgspec.DecodeError):
            state_of(stored, 1)
        return
    assert record.definition == "d"
    assert record.state == state_of(stored, 1)
    assert record.histories == histories_of(stored.lanes, 1, names)


def state_of(stored: StoredStates, key: int) -> dict[str, object]:
    return {
        name: msgspec.json.decode(stored.text(i, key))
        if kind == TEXT
        else int(stored.values.whole[i, key])
        if stored.values.known[i, key]
        else None
        for i, (name, kind) in enumerate(FIELDS.items())
    }


def histories_of(arrays: LaneArrays, state: int, names: LaneNames) -> Histories:
    lanes: dict[str, History] = {}
    for lane in range(int(arrays.starts[state]), int(arrays.starts[state + 1])):
        flat = arrays.held[arrays.first[lane] : arrays.first[lane + 1]].tolist()
        width = int(arrays.width[lane])
        held = tuple(zip(*(flat[i::width] for i in range(width)), strict=True))
        floor = tuple(arrays.floors[arrays.floor_first[lane] : arrays.floor_first[lane + 1]].tolist()) or None
        lanes[names.names[arrays.lane[lane]]] = History(held, floor, int(arrays.used[lane]), bool(arrays.wide[lane]))
    return Histories(lanes)

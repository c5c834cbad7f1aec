import json
import pickle

import google_crc32c
import msgspec
import pytest

from envelope import Histories, History, Standing
from persistence.errors import Corrupt
from persistence.names import FlowRef
from persistence.record import StateRecord, decode_record, encode_record
from persistence.seal import DamagedError, seal, unseal

STAGE = FlowRef("fleet").stage("aircraft")
LANE = "flights.raw:2#Qx1>wrap>flights.legs"

RECORD = StateRecord(
    "9f2c",
    {"legs": 7, "minutes": 12.5, "first": None, "big": 2**63 - 1},
    Histories(
        {LANE: History(((41, 0), (41, 1)), (17, 1), 6), "retired:0#": History((), (3,)), "new:0#": History(((0,),))},
        {"flights.raw:2#Qx1>wrap>flights.legs": frozenset({(12, 0), (13, 0, "id-1")})},
    ),
)


def read(value):
    return decode_record(value, STAGE, b"N14228")


def test_a_record_comes_back_equal():
    assert read(encode_record(RECORD)) == RECORD


def test_positions_with_and_without_an_event_id_stay_apart_in_one_lane():
    record = StateRecord("d", 1, Histories({LANE: History(((5, -1), (5, -1, "id"), (6, -1)))}))
    assert read(encode_record(record)) == record


def test_a_record_is_one_readable_json_object():
    value = json.loads(encode_record(RECORD))
    assert value["state"]["legs"] == 7
    assert value["lanes"][LANE] == [{"held": [41, 41], "index": [[0, 1]], "floor": [17, 1], "used": 6}]
    assert value["retired"]["retired:0#"] == [{"floor": [3]}]
    assert list(value)[-1] == "crc32c"


def sealed(**changes):
    """A record with a right checksum and some members replaced."""
    members = json.loads(encode_record(RECORD)) | changes
    del members["crc32c"]
    return seal(msgspec.json.encode(members))


GOOD = encode_record(RECORD)

DAMAGED = {
    "empty": b"",
    "truncated": GOOD[:-1],
    "cut in half": GOOD[: len(GOOD) // 2],
    "one digit changed": GOOD.replace(b'"legs":7', b'"legs":8'),
    "checksum changed": GOOD[:-3] + (b"0" if GOOD[-3:-2] != b"0" else b"1") + GOOD[-2:],
    "something behind it": GOOD + b"\n",
    "two after another": GOOD + GOOD,
    "json without a checksum": b'{"schema":2,"definition":"d","state":1,"lanes":{}}',
    "json of another kind": b"7",
    "pickled": pickle.dumps({"legs": 7}),
    "pickled by hand": pickle.dumps(RECORD.state, protocol=0),
    "not bytes": "text",
    "none": None,
    "lanes of a wrong type": sealed(lanes=[1]),
    "a position that is no position": sealed(lanes={LANE: [{"held": [None]}]}),
    "positions that do not fit": sealed(lanes={LANE: [{"held": [1, 2, 3], "index": [[0, 1]]}]}),
    "a step back": sealed(lanes={LANE: [{"steps": [-1, 2]}]}),
    "a run that nothing could hold": sealed(lanes={LANE: [{"steps": [1, -(2**40)]}]}),
    "more partitions than hops": sealed(lanes={LANE: [{"at": [1, 2], "held": [1]}]}),
    "more floors than lanes": sealed(retired={LANE: [{"at": [[0, -1]], "floor": [[0, 1, 2, 3]]}]}),
    "a floor without a lane": sealed(retired={LANE: [{"at": [[]], "floor": [3]}]}),
    "no definition": seal(b'{"schema":2,"state":1,"lanes":{}}'),
    "an older schema": sealed(schema=1),
    "no schema": seal(b'{"definition":"d","state":1,"lanes":{}}'),
    "not utf-8": seal(b'{"schema":2,"definition":"\xff","state":1,"lanes":{}}'),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_is_corrupt_and_never_an_empty_state(damage):
    with pytest.raises(
        Corrupt, match=r"flow fleet, generation 1, stage aircraft, key b'N14228'.*headwater run --generation"
    ):
        read(DAMAGED[damage])


def test_no_single_changed_byte_goes_unseen():
    for place in range(len(GOOD)):
        with pytest.raises(Corrupt):
            read(GOOD[:place] + bytes([GOOD[place] ^ 1]) + GOOD[place + 1 :])


def test_a_record_of_a_newer_version_is_refused_whatever_its_layout():
    with pytest.raises(
        Corrupt, match=r"aircraft, key b'N14228': the state has schema 3; this code reads 2\. Upgrade headwater"
    ):
        read(sealed(schema=3, lanes="laid out in another way"))


def test_nothing_of_the_state_is_in_the_error():
    secret = sealed(lanes={LANE: [{"held": [["hunter2"]]}]}, state="hunter2")
    with pytest.raises(Corrupt) as caught:
        read(secret)
    assert "hunter2" not in str(caught.value)


def test_a_seal_keeps_the_object_readable_for_others():
    value = seal(b'{"a":1}')
    assert json.loads(value)["a"] == 1
    assert unseal(value) is value
    with pytest.raises(DamagedError):
        unseal(b'{"a":1}')


def test_a_seal_is_eight_digits_of_the_crc_of_all_before_it():
    assert seal(b'{"a":1}') == b'{"a":1,"crc32c":"%08x"}' % google_crc32c.value(b'{"a":1')
    assert seal(b'{"n":27}') == b'{"n":27,"crc32c":"%08x"}' % google_crc32c.value(b'{"n":27')
    low = next(body for body in (b'{"a":%d}' % n for n in range(1000)) if google_crc32c.value(body[:-1]) < 2**28)
    assert unseal(seal(low))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "^the value is of type str, not bytes$"),
        (b"", "^0 bytes without a checksum at their end: truncated, or written by something else$"),
        (b"[" + GOOD[1:], f"^{len(GOOD)} bytes without a checksum at their end"),
        (GOOD[:-2] + b"'}", f"^{len(GOOD)} bytes without a checksum at their end"),
        (GOOD[:-2] + b'"]', f"^{len(GOOD)} bytes without a checksum at their end"),
        (GOOD.replace(b'"crc32c"', b'"CRC32c"'), f"^{len(GOOD)} bytes without a checksum at their end"),
        (GOOD.replace(b'"legs":7', b'"legs":8'), f"^{len(GOOD)} bytes that do not match their checksum$"),
    ],
)
def test_a_seal_that_does_not_hold_says_what_is_wrong_and_quotes_nothing(value, text):
    with pytest.raises(DamagedError, match=text):
        unseal(value)


def test_what_is_wrong_is_in_the_error_of_the_state():
    with pytest.raises(Corrupt, match=r"the state cannot be read: a lane's positions are inconsistent\. Restore"):
        read(sealed(lanes={LANE: [{"held": [1, 2, 3], "index": [[0, 1]]}]}))


@pytest.mark.parametrize("lane", [{"width": -1, "held": [1]}, {"width": 0, "held": [1]}, {"width": -1}])
def test_an_impossible_width_of_schema_1_is_corrupt(lane):
    with pytest.raises(Corrupt):
        read(sealed(schema=1, lanes={LANE: lane}))


def test_a_lane_keeps_its_floor_and_its_age_however_wide_its_positions_are():
    for held in [(), ((1,), (2,)), ((1, 2, 3), (4, 5, 6)), ((1,), (1, "id"))]:
        lanes = {LANE: History(held, (0, 1), 7), "other": History(held)}
        record = StateRecord("d", 1, Histories(lanes))
        assert read(encode_record(record)) == record


def test_the_same_record_is_always_the_same_bytes():
    some = [(n, "id") for n in range(50)]
    one, other = (StateRecord("d", 1, Histories({}, {"g": frozenset(order)})) for order in (some, some[::-1]))
    assert encode_record(one) == encode_record(other)
    assert json.loads(encode_record(one))["holes"]["g"] == [list(position) for position in some]


def lanes_of(record):
    return json.loads(encode_record(record))["lanes"][LANE]


def test_consecutive_offsets_are_one_run_and_the_history_stays_small_however_wide_it_is():
    consecutive = StateRecord("d", 1, Histories({LANE: History(tuple((10**9 + n, 0) for n in range(1024)))}))
    scattered = StateRecord("d", 1, Histories({LANE: History(tuple((10**9 + 97 * n, 0) for n in range(1024)))}))
    mixed = StateRecord("d", 1, Histories({LANE: History(tuple((n, 0) for n in (*range(5, 70), 80, 81, 90)))}))
    assert lanes_of(consecutive) == [{"steps": [10**9, -1023], "index": [0]}]
    assert lanes_of(mixed) == [{"steps": [5, -64, 11, 1, 9], "index": [0]}]
    assert len(encode_record(scattered)) < 4 * 1024
    assert [read(encode_record(record)) for record in (consecutive, scattered, mixed)] == [
        consecutive,
        scattered,
        mixed,
    ]


def test_a_key_that_comes_over_a_hundred_times_a_hundred_partitions_has_a_small_record():
    group = "flights.raw:{}#Qx1Zb3YtQ0aJm1vXkq8Ucw>timetable>flights.legs"
    names = [(f"{group.format(root)}:{middle}", group.format(root)) for root in range(100) for middle in range(100)]
    histories = Histories()
    for batch in (1, 2):
        standings = [Standing(*name, (1000 * batch + n, 0)) for name in names for n in range(2)]
        histories, _ = histories.folding(standings, batch=batch)
    record = StateRecord("d", {"n": 1}, histories)
    assert len(histories.lanes) == 10_000
    assert len(encode_record(record)) < 30_000
    assert read(encode_record(record)) == record


def test_lanes_of_one_group_are_told_apart_by_every_partition_of_their_names():
    names = ["a:0#i>r>b>s>c", "a:0#i>r>b:1>s>c", "a:0#i>r>b:1>s>c:0", "a:0#i>r>b:1>s>c:7", "a:0#i>r>b:2>s>c:7>branch"]
    held = {name: History(((n, 0, 1),), (n, 0, 0), 3) for n, name in enumerate(names)}
    retired = {name: History((), (7 * n, 1, n)) for n, name in enumerate(names)}
    for histories in (held, retired, {**held, "!a:0#i>r>b>s>c": held[names[0]]}):
        record = StateRecord("d", 1, Histories(histories))
        assert read(encode_record(record)) == record


def test_a_wide_lane_is_wide_when_it_is_read_again_and_so_is_one_without_indexes():
    lanes = {LANE: History(((1, 0),), (0, 0), 3, wide=True), f"{LANE}:1": History(((1, -1, "id"),), loose=True)}
    read_again = read(encode_record(StateRecord("d", 1, Histories(lanes)))).histories.lanes
    assert [(one.wide, one.loose) for one in read_again.values()] == [(True, False), (False, True)]

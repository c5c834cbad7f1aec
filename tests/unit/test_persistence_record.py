import json
import pickle

import msgspec
import pytest

from envelope import Window, Windows
from persistence.errors import Corrupt
from persistence.names import FlowRef
from persistence.record import StateRecord, decode_record, encode_record
from persistence.seal import DamagedError, seal, unseal

STAGE = FlowRef("fleet").stage("aircraft")
LANE = "flights.raw:2#Qx1>wrap>flights.legs"

RECORD = StateRecord(
    "9f2c",
    {"legs": 7, "minutes": 12.5, "first": None, "big": 2**63 - 1},
    Windows(
        {LANE: Window(((41, 0), (41, 1)), (17, 1), 6), "retired:0#": Window((), (3,), 2), "new:0#": Window(((0,),))},
        {"flights.raw:2#Qx1>wrap>flights.legs": frozenset({(12, 0), (13, 0, "id-1")})},
    ),
)


def read(value):
    return decode_record(value, STAGE, b"N14228")


def test_a_record_comes_back_equal():
    assert read(encode_record(RECORD)) == RECORD


def test_positions_with_and_without_an_event_id_stay_apart_in_one_lane():
    record = StateRecord("d", 1, Windows({LANE: Window(((5, -1), (5, -1, "id"), (6, -1)))}))
    assert read(encode_record(record)) == record


def test_a_record_is_one_readable_json_object():
    value = json.loads(encode_record(RECORD))
    assert value["state"]["legs"] == 7
    assert value["lanes"][LANE] == {"width": 2, "held": [41, 0, 41, 1], "floor": [17, 1], "used": 6}
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
    "json without a checksum": b'{"schema":1,"definition":"d","state":1,"lanes":{}}',
    "json of another kind": b"7",
    "pickled": pickle.dumps({"legs": 7}),
    "pickled by hand": pickle.dumps(RECORD.state, protocol=0),
    "not bytes": "text",
    "none": None,
    "lanes of a wrong type": sealed(lanes=[1]),
    "a position that is no position": sealed(lanes={LANE: {"width": 1, "held": [None]}}),
    "positions that do not fit": sealed(lanes={LANE: {"width": 2, "held": [1, 2, 3]}}),
    "no definition": seal(b'{"schema":1,"state":1,"lanes":{}}'),
    "no schema": seal(b'{"definition":"d","state":1,"lanes":{}}'),
    "not utf-8": seal(b'{"schema":1,"definition":"\xff","state":1,"lanes":{}}'),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_is_corrupt_and_never_an_empty_state(damage):
    with pytest.raises(Corrupt, match=r"flow fleet, generation 1, stage aircraft, key b'N14228'.*headwater replay"):
        read(DAMAGED[damage])


def test_no_single_changed_byte_goes_unseen():
    for place in range(len(GOOD)):
        with pytest.raises(Corrupt):
            read(GOOD[:place] + bytes([GOOD[place] ^ 1]) + GOOD[place + 1 :])


def test_a_record_of_a_newer_version_is_refused_whatever_its_layout():
    with pytest.raises(Corrupt, match=r"schema 2, this code reads 1. Upgrade headwater"):
        read(sealed(schema=2, lanes="laid out in another way"))


def test_nothing_of_the_state_is_in_the_error():
    secret = sealed(lanes={LANE: {"width": 1, "held": [["hunter2"]]}}, state="hunter2")
    with pytest.raises(Corrupt) as caught:
        read(secret)
    assert "hunter2" not in str(caught.value)


def test_a_seal_keeps_the_object_readable_for_others():
    value = seal(b'{"a":1}')
    assert json.loads(value)["a"] == 1
    assert unseal(value) is value
    with pytest.raises(DamagedError):
        unseal(b'{"a":1}')

"""Bytes that are out there: what was written once must be read, and written the same, by every later version."""

from envelope import Envelope, Histories, History, Hop, append_hop, decode, encode
from persistence.protocol import StageRef
from persistence.record import StateRecord, decode_record, encode_record

ENVELOPE = Envelope(
    payload=b'{"tail":"N14228"}',
    chain=(
        Hop(
            *("flights.raw", 2, 17),
            via="wrap",
            index=1,
            count=2,
            rekeyed=True,
            topic_id="Qx1-_w",
            leader_epoch=3,
            timestamp_ms=1356998400000,
        ),
        Hop("flights.legs", 0, 4, via="retry", pass_through=True, cluster="west"),
    ),
    key=b"N14228",
    event_id="e-1",
    event_time_us=-1,
    payload_type="headwater.demo.v1.Leg",
    content_type="application/json",
    producer="wing-7",
    sequence=0,
    destination="flights.legs",
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
)
WRITTEN = bytes.fromhex(
    "080110011a03652d3120ffffffffffffffffff012a064e313432323832156865616477617465722e64656d6f2e76312e4c6567"
    "3a117b227461696c223a224e3134323238227d42106170706c69636174696f6e2f6a736f6e520677696e672d375800"
    "620c666c69676874732e6c6567736a3730302d30616637363531393136636434336464383434386562323131633830333139"
    "632d623761643662373136393230333333312d30314a2e0a0b666c69676874732e7261771002181122047772617028013002"
    "38014a065178312d5f7750035880b0a19bbf274a210a0c666c69676874732e6c656773100018042205726574727940016204"
    "77657374fd7f8dd2aae5"
)


def test_a_full_envelope_is_written_as_ever_and_read_as_ever() -> None:
    assert encode(ENVELOPE).hex() == WRITTEN.hex()
    assert decode(WRITTEN) == ENVELOPE


def test_a_batch_of_a_producer_session_is_written_as_ever_and_read_as_ever() -> None:
    batch = Envelope(
        b"p", producer="till 3", sequence=5, producer_epoch=2, last_sequence=9, sequence_per_partition=True
    )
    assert encode(batch).hex() == "080110013a0170520674696c6c2033580570027809800101fd7f456295ca"
    assert decode(encode(batch)) == batch


def test_the_smallest_envelope_is_its_head_and_its_seal() -> None:
    assert encode(Envelope(b"")).hex() == "08011001fd7fddc8ccd6"


def test_an_appended_hop_stands_between_the_body_and_the_seal() -> None:
    appended = append_hop(WRITTEN, Hop("c", 1, 9, via="s", index=0))
    assert appended.startswith(WRITTEN[:-6])
    assert appended[len(WRITTEN) - 6 : -6].hex() == "4a0c0a0163100118092201732800"
    assert decode(appended) == ENVELOPE.with_hop(Hop("c", 1, 9, via="s", index=0))


LANES = StateRecord(
    "9f2c4b1a00e7d355",
    {"legs": 7},
    Histories(
        {
            "a:2#Qx1>r>b:4": History(((41, 0), (41, 1), (44, 0)), (17, 1), 6),
            "a:2#Qx1>r>b:5": History(tuple((n, 0) for n in (*range(50, 115), 200)), None, 6),
            **{f"a:0#Qx1>r>b:{n}": History((), (500 + n % 3, 0)) for n in range(4)},
        },
    ),
)
STORED = (
    b'{"schema":2,"definition":"9f2c4b1a00e7d355","state":{"legs":7},"lanes":{"a:2#Qx1>r>b":['
    b'{"at":[4],"held":[41,41,44],"index":[[0,1,0]],"floor":[17,1],"used":6},'
    b'{"at":[5],"steps":[50,-64,86],"index":[0],"used":6}]},'
    b'"retired":{"a:0#Qx1>r>b":[{"at":[[0,-3]],"floor":[[500,0,1,2,0],0]}]},"crc32c":"6c88f628"}'
)


def test_a_state_record_is_written_as_ever_and_read_as_ever() -> None:
    assert encode_record(LANES) == STORED
    assert decode_record(STORED, StageRef("fleet", 1, "aircraft"), b"N14228") == LANES


MANY = StateRecord(
    "9f2c4b1a00e7d355",
    {"legs": 7},
    Histories(
        {
            **{f"a:0#Qx1>r>b:{n}>s>c:{n % 3}": History((), (500 + 8_675_309 * n % 1000, n % 2)) for n in range(40)},
            **{f"a:1#Qx1>r>b:{2 * n}": History((), (9, 0)) for n in range(25)},
        }
    ),
)
STORED_MANY = (
    b'{"schema":2,"definition":"9f2c4b1a00e7d355","state":{"legs":7},"lanes":{},"retired":{'
    b'"a#Qx1>r>b>s>c":{"0":[[[[0,-39],"0:2:GGGGGGGGGGGGGA=="],'
    b'["500:10:ABNZq587Ih1Yo3Yw0WmPsQEVGnvsD9jLZy0enHhraC1QiVejPBQ6Q94MV+svHxsbmDM=","0:1:VVVVVVU="]]]},'
    b'"a#Qx1>r>b":{"1":[[[[0,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2,2]],[9,0]]]}},"crc32c":"e41de33f"}'
)


def test_many_retired_lanes_are_written_as_ever_and_read_as_ever() -> None:
    assert encode_record(MANY) == STORED_MANY
    assert decode_record(STORED_MANY, StageRef("fleet", 1, "aircraft"), b"N14228") == MANY

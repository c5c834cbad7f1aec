"""States of which most lanes are retired: their floors are packed in the record, and in memory until they are needed."""

import json
import random
from collections.abc import Callable, Mapping

import msgspec
import pytest

from aggregations.columns.lane_names import LaneNames
from aggregations.columns.records import StoredStates, form_of
from envelope import Histories, History, Position, Standing
from envelope.dedup.packed import PackedLanes, divided, opened
from envelope.dedup.room import KNOWN_LANES
from persistence.errors import Corrupt
from persistence.floors import MANY_FLOORS, PackedFloors
from persistence.names import FlowRef
from persistence.record import StateRecord, decode_record, encode_record
from persistence.seal import seal

STAGE = FlowRef("fleet").stage("aircraft")
PATH = "flights.raw:{}#Qx1Zb3YtQ0aJm1vXkq8Ucw>timetable>flights.legs"


def retired(roots: int, partitions: int, floor: Callable[[], Position]) -> dict[str, History]:
    return {f"{PATH.format(root)}:{n}": History((), floor()) for root in range(roots) for n in range(partitions)}


def written(lanes: Mapping[str, History]) -> bytes:
    return encode_record(StateRecord("d", {"n": 1}, Histories(lanes)))


def read(value: bytes) -> Histories:
    return decode_record(value, STAGE, b"k").histories


def packed_of(histories: Histories) -> Mapping[str, Mapping[str, History]]:
    return divided(histories.lanes)[1]


def never() -> None:
    raise AssertionError("the lanes of a group are made without need")


class Sealed(dict[str, History]):
    """Retired lanes that must not be made."""

    __getitem__ = __iter__ = keys = items = lambda *_: never()  # type: ignore[assignment]


@pytest.mark.parametrize("spread", [1_000, 10**6, 10**8])
def test_ten_thousand_retired_lanes_have_a_small_record_wherever_their_floors_are(spread: int) -> None:
    rng = random.Random(7)
    lanes = retired(100, 100, lambda: (rng.randrange(spread), 0))
    value = written(lanes)
    assert len(value) <= 50_000
    assert read(value) == Histories(lanes)


def test_few_retired_lanes_stay_readable_and_one_more_is_packed_with_them() -> None:
    lanes = retired(2, MANY_FLOORS // 2, lambda: (500, 0))
    group = PATH.format(1)
    assert MANY_FLOORS == 64
    assert json.loads(written(lanes))["retired"][group] == [{"at": [[0, -31]], "floor": [500, 0]}]
    assert not packed_of(read(written(lanes)))
    assert written(dict(reversed(lanes.items()))) == written(lanes)
    more = lanes | {f"{group}:32": History((), (500, 0))}
    path = "flights.raw#Qx1Zb3YtQ0aJm1vXkq8Ucw>timetable>flights.legs"
    assert json.loads(written(more))["retired"] == {
        path: {"0": [[[[0, -31]], [500, 0]]], "1": [[[[0, -32]], [500, 0]]]}
    }
    assert packed_of(read(written(more))).keys() == {PATH.format(0), group}


def test_lanes_of_all_shapes_are_packed_and_read() -> None:
    rng = random.Random(3)
    lanes = retired(2, 40, lambda: (rng.randrange(10**6), rng.randrange(4)))
    for n, group in enumerate([PATH.format(0), "raw:0#", "raw:1", "odd:07>x:1", "!raw:0#>r>b>s>c", ""]):
        lanes |= {group: History((), (n,)), f"{group}:5": History((), (n, 0, 7)), f"{group}:6": History((), (n, 0))}
    lanes |= {"raw:0#R>r>b:3>s>c:1": History((), (1, -1)), "raw:0#R>r>b:3": History((), (1,))}
    lanes |= {"raw:0#R>r>b:4": History((), (1, "id")), "raw:0#R>r>b:5": History(((4, 0),), (1, 0), 6)}
    lanes |= {"raw:0#R>r>b:6": History((), (1, 0), 6), "raw:0#R>r>b:7": History((), (1, 0), wide=True)}
    histories = read(written(lanes))
    assert histories == Histories(lanes)
    assert set(histories.lanes) == set(lanes)
    assert len(histories.lanes) == len(lanes)
    assert [histories.lanes[lane] for lane in lanes] == list(lanes.values())
    assert written(histories.lanes) == written(lanes)


def test_a_lane_that_the_state_has_not_is_found_in_no_group() -> None:
    lanes = read(written(retired(2, 40, lambda: (5, 0)))).lanes
    assert f"{PATH.format(0)}:39" in lanes
    for lane in (f"{PATH.format(0)}:40", PATH.format(0), f"{PATH.format(2)}:0"):
        assert lane not in lanes
        with pytest.raises(KeyError):
            lanes[lane]


def test_only_the_group_of_a_message_is_unpacked() -> None:
    group, other = "a:0#i>r>b", "a:1#i>r>b"
    lanes = PackedLanes({}, {group: {f"{group}:1": History((), (9, 0))}, other: Sealed({f"{other}:1": History()})})
    one = Standing(f"{group}:1", group, (10, 0))
    assert [decision.fold for decision in Histories(lanes).judge([one])] == [True]
    after, gone = Histories(lanes).folding([one], batch=3)
    assert not gone
    assert after.lanes[one.lane] == History(((10, 0),), (9, 0), 3)
    assert len(after.lanes) == len(lanes) == 2
    assert packed_of(after).keys() == {other}
    assert packed_of(Histories(lanes)).keys() == {group, other}
    assert after.group(group) is not None
    assert after.group(other) is None


def test_the_last_packed_group_leaves_a_plain_mapping() -> None:
    lanes = PackedLanes({}, {"a:0#i": {"a:0#i": History((), (9,))}})
    after, _ = Histories(lanes).folding([Standing("a:0#i", "a:0#i", (10,))], batch=3)
    assert after.lanes == {"a:0#i": History(((10,),), (9,), 3)}
    assert isinstance(after.lanes, dict)


def test_opened_lanes_are_not_those_of_the_state() -> None:
    lanes = PackedLanes({"a": History(used=1)}, {"b": {"b": History(used=2)}, "c": {"c": History(used=3)}})
    known, packed = opened(lanes, ["b", "unknown"])
    known["new"] = History()
    assert known == {"a": History(used=1), "b": History(used=2), "new": History()}
    assert packed == {"c": {"c": History(used=3)}}
    assert lanes == {"a": History(used=1), "b": History(used=2), "c": History(used=3)}


def test_groups_without_a_message_are_written_as_they_were_read() -> None:
    rng = random.Random(5)
    histories = read(written(retired(100, 100, lambda: (rng.randrange(10**6), 0))))
    before = {group: lanes.blocks for group, lanes in packed_of(histories).items() if isinstance(lanes, PackedFloors)}
    one = Standing(f"{PATH.format(7)}:8", PATH.format(7), (10**7, 0))
    after, _ = histories.folding([one], batch=2, lanes=0)
    again = read(written(after.lanes))
    assert again == after
    assert len(again.lanes) == 10_000
    assert again.lanes[one.lane] == History((), (10**7, 0))
    assert {group for group, lanes in packed_of(again).items() if lanes.blocks != before[group]} == {PATH.format(7)}  # type: ignore[attr-defined]


def test_a_lane_that_is_retired_joins_the_packed_ones_of_its_group() -> None:
    lanes = retired(2, 40, lambda: (5, 0))
    group = PATH.format(1)
    kept = read(written(lanes)).lanes
    joined = PackedLanes({f"{group}:40": History((), (6, 0))}, divided(kept)[1])
    assert written(joined) == written(lanes | {f"{group}:40": History((), (6, 0))})


def test_when_few_are_left_they_are_readable_again() -> None:
    lanes = retired(2, 40, lambda: (5, 0))
    group = PATH.format(1)
    histories, _ = read(written(lanes)).folding([Standing(f"{group}:{n}", group, (9, 0)) for n in range(40)], batch=1)
    assert packed_of(histories).keys() == {PATH.format(0)}
    assert written(histories.lanes) == written(dict(histories.lanes))
    assert list(json.loads(written(histories.lanes))["retired"]) == [PATH.format(0)]


def test_names_with_fewer_partitions_come_first() -> None:
    lanes = {"a:0#i>r>b:0>s>c:5": History((), (1,)), "a:0#i>r>b:1>s>c": History((), (1,))}
    blocks = json.loads(written(lanes))["retired"]["a:0#i>r>b>s>c"]
    assert [block["at"] for block in blocks] == [[[1]], [[0], 5]]


BLOCK = [[[0, -64]], ["0:1:AVVVVVVVVVVV", 0]]
DAMAGED = {
    "no partitions": [[[]], [5]],
    "partitions that are no steps": [[7], [5]],
    "partitions in a packed column": [["0:1:AVVVVVVVVVVV"], [5]],
    "no floors": [[[0, -64]], []],
    "other floors than lanes": [[[0, -64]], [[5, 0, 1]]],
    "other partitions than lanes": [[[0, -64], [5, 0, 1]], [5]],
    "a packed column of another length": [[[0, -63]], BLOCK[1]],
    "a run that nothing could hold": [[[0, -(1 << 40)]], [5]],
    "more partitions than hops": [[[0, -64], 1, 1], [5]],
    "several floors of one lane": [[], [[5, 0, 1]]],
}


def sealed(block: object) -> bytes:
    record = {"schema": 2, "definition": "d", "state": 1, "lanes": {}, "retired": {"a#i>r>b>s>c": {"0": [block]}}}
    return seal(msgspec.json.encode(record))


def test_a_packed_block_is_read_whole() -> None:
    assert len(read(sealed(BLOCK)).lanes) == 65
    assert read(sealed([[], [5, 0]])) == Histories({"a:0#i>r>b>s>c": History((), (5, 0))})


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_block_is_noticed_before_it_is_unpacked(damage: str) -> None:
    with pytest.raises(Corrupt):
        read(sealed(DAMAGED[damage]))


def test_as_many_lanes_as_a_state_may_have_are_packed() -> None:
    rng = random.Random(1)
    lanes = retired(128, KNOWN_LANES // 128, lambda: (rng.randrange(10**4), 0))
    assert read(written(lanes)) == Histories(lanes)


def test_packed_lanes_are_not_numbered_for_arrays() -> None:
    lanes = retired(2, 40, lambda: (5, 0)) | {"raw:0#R": History(((4, 0),), used=6)}
    names = LaneNames()
    stored = StoredStates([written(lanes)], form_of("d", None), names)
    assert stored.other.tolist() == [True]
    assert names.names == ["raw:0#R"]

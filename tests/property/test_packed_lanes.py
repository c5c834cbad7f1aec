"""States with packed lanes: they come back, and judge and fold as those whose lanes are all unpacked."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from envelope import Histories, History, Position, Route, Standing
from envelope.dedup.lanes import group_of
from envelope.dedup.packed import PackedLanes, divided
from persistence.columns import check_column, numbers_of, plain_column, shortest_column
from persistence.floors import MANY_FLOORS
from persistence.names import FlowRef
from persistence.record import StateRecord, decode_record, encode_record

AT = FlowRef("f").stage("s")
LANES = [f"{mark}a:{root}#i>r>b{middle}" for mark in ("", "!") for root in (0, 1) for middle in ("", ":0", ":1", ":2")]

numbers = st.lists(st.integers(-1, 2**63 - 1) | st.integers(0, 1000), min_size=1, max_size=70)
positions = st.tuples(st.integers(0, 12), st.integers(0, 1))


@given(numbers)
def test_any_column_comes_back_and_is_never_longer_than_plain(column: list[int]) -> None:
    for written in (plain_column(column), shortest_column(column)):
        check_column(written, len(column))
        assert list(numbers_of(written, len(column))) == column
    assert len(str(shortest_column(column))) <= len(str(plain_column(column)))


@st.composite
def retired(draw: st.DrawFn) -> dict[str, History]:
    """Many retired lanes of several paths, roots and shapes."""
    spread = draw(st.sampled_from([1, 1000, 2**63 - 1]))
    rng = draw(st.randoms(use_true_random=False))
    lanes = {}
    for root in range(draw(st.integers(1, 3))):
        for hops in draw(st.sets(st.integers(0, 2), min_size=1)):
            for n in range(draw(st.integers(1, 60))):
                tail = "".join(f">r>t{hop}:{rng.randrange(1 + n * (hop + 1))}" for hop in range(hops))
                floor: Position = (rng.randrange(spread), *(rng.randrange(-1, 3) for _ in range(hops)))
                lanes[f"a:{root}#i{tail}{draw(st.sampled_from(['', '>branch']))}"] = History((), floor)
    return lanes


@given(retired(), st.dictionaries(st.sampled_from(LANES), st.builds(History, st.just(((9, 0),)), used=st.just(4))))
def test_a_state_with_many_retired_lanes_comes_back_and_is_always_the_same_bytes(
    floors: dict[str, History], others: dict[str, History]
) -> None:
    record = StateRecord("d", 1, Histories(floors | others))
    value = encode_record(record)
    again = decode_record(value, AT, b"k")
    assert again == record
    assert bool(divided(again.histories.lanes)[1]) == (len(floors) > MANY_FLOORS)
    assert encode_record(again) == value


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, History], Mapping[str, History]]:
    """The lanes of a state, all unpacked, and the same with the retired ones of some groups packed."""
    lanes = {
        lane: draw(
            st.builds(History, st.just(()), positions)
            | st.builds(lambda held: History(tuple(sorted(held)), None, 1), st.sets(positions, min_size=1, max_size=4))
        )
        for lane in draw(st.sets(st.sampled_from(LANES)))
    }
    groups = draw(st.sets(st.sampled_from(sorted({group_of(lane) for lane in LANES}))))
    packed: dict[str, dict[str, History]] = {}
    for lane, history in lanes.items():
        if not history.held and group_of(lane) in groups:
            packed.setdefault(group_of(lane), {})[lane] = history
    rest = {lane: history for lane, history in lanes.items() if lane not in packed.get(group_of(lane), {})}
    return lanes, PackedLanes(rest, packed)


standings = st.builds(
    lambda lane, position, route, wide: Standing(lane, group_of(lane), position, route, wide=wide),
    st.sampled_from([lane for lane in LANES if not lane.startswith("!")]),
    positions,
    st.sampled_from(Route),
    st.booleans(),
)


@given(states(), st.lists(st.lists(standings, max_size=6), max_size=3), st.integers(0, 3), st.booleans())
def test_packed_lanes_change_no_verdict_and_no_history(
    lanes: tuple[dict[str, History], Mapping[str, History]], batches: list[list[Standing]], limit: int, evict: bool
) -> None:
    plain, packed = map(Histories, lanes)
    assert packed == plain
    for number, batch in enumerate(batches, start=2):
        decisions = plain.judge(batch)
        assert packed.judge(batch) == decisions
        folded = [one for one, decision in zip(batch, decisions, strict=True) if decision.fold]
        plain, gone = plain.folding(folded, size=2, lanes=limit, batch=number, evict=evict)
        packed, also = packed.folding(folded, size=2, lanes=limit, batch=number, evict=evict)
        assert (packed, also) == (plain, gone)
        for one in batch:
            if one not in folded:
                plain, packed = plain.leaving_hole(one), packed.leaving_hole(one)

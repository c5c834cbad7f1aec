"""Verdicts and histories of whole batches against the pure code, over courses of batches."""

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.columns import Lane
from aggregations.columns.history import fold_histories
from aggregations.columns.judge import VERDICTS, judge
from aggregations.columns.order import sorted_rows
from aggregations.columns.schema import MISSING
from envelope import Histories, Standing, Verdict, group_of, in_order
from envelope.dedup.lineage import NO_INDEX

LANES = ["a:0#i", "b:1#i>r>c:1", "a:0#i>r>b:0", "a:0#i>r>b:1", "a:1#i>r>b:0", "a:0#i>s>b", "a:0#i>s>b>r>c"]
WIDTHS = [1, 2, 2, 2, 2, 2, 3]
KEYLESS = [False, False, True, False, True, False, False]
SIZE, MOST_LANES, KEYS = 4, 3, 3
FAR = 2**62

# Key, lane, position (cut to the width of the lane), and whether something else makes the message exotic.
Message = tuple[int, int, tuple[int, int, int], bool]
offsets = st.integers(0, 9) | st.sampled_from([FAR, 2**63 - 2])
exotic_now_and_then = st.integers(0, 40).map(lambda number: number == 7)


@st.composite
def courses(draw: st.DrawFn) -> list[list[Message]]:
    """Batches for few keys and few lanes, so that histories fill, overlap and evict."""
    lanes = draw(st.lists(st.integers(0, len(LANES) - 1), min_size=1, max_size=4, unique=True))
    # One message without an index leaves its key to the pure code.
    positions = st.tuples(offsets, st.integers(draw(st.sampled_from([0, 0, 0, -1])), 1), st.integers(0, 1))
    keys = st.integers(0, draw(st.integers(0, KEYS - 1)))
    messages = st.tuples(keys, st.sampled_from(lanes), positions, exotic_now_and_then)
    return draw(st.lists(st.lists(messages, max_size=16), max_size=5))


def standing(message: Message) -> Standing:
    _, lane, position, _ = message
    return Standing(LANES[lane], group_of(LANES[lane]), position[: WIDTHS[lane]], wide=is_wide(message))


def is_wide(message: Message) -> bool:
    """Some of the messages of two lanes came without a key."""
    _, lane, (root, *_), _ = message
    return KEYLESS[lane] and root % 2 == 0


def is_exotic(message: Message) -> bool:
    """What lacks an index always is."""
    return message[3] or NO_INDEX in standing(message).position


def arrays(batch: list[Message]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], np.ndarray]:
    positions = [
        [position[i] if i < WIDTHS[lane] else MISSING for _, lane, position, _ in batch] for i in range(max(WIDTHS))
    ]
    return (
        np.array([key for key, *_ in batch], np.int64),
        np.array([lane for _, lane, *_ in batch], np.int64),
        [np.array(component, np.int64) for component in positions],
        np.array([is_exotic(message) for message in batch], np.bool_),
    )


def crosses_lanes(standings: list[Standing]) -> bool:
    lanes: dict[tuple[str, object], set[str]] = {}
    for one in standings:
        lanes.setdefault((one.group, one.position), set()).add(one.lane)
    return any(len(names) > 1 for names in lanes.values())


def is_loose(histories: Histories, standings: list[Standing]) -> bool:
    return any(one.lane in histories.lanes and histories.lanes[one.lane].loose for one in standings)


@settings(max_examples=300, deadline=None)
@given(courses(), st.booleans(), st.data())
def test_every_verdict_and_every_history_is_that_of_the_pure_code(
    course: list[list[Message]], doubled: bool, data: st.DataObject
) -> None:
    with patch("envelope.dedup.history.HISTORY", 2), patch("envelope.dedup.history.WIDE", 5):
        judge_both_ways(course, doubled, data)


def judge_both_ways(course: list[list[Message]], doubled: bool, data: st.DataObject) -> None:
    histories = [Histories() for _ in range(KEYS)]
    # Two routes may lead to one lane: then it has two numbers, and one more for what came without a key.
    places = [Lane(lane, group_of(lane)) for lane in LANES] * (2 if doubled else 1)
    keyless = len(places)
    places += [place._replace(wide=True) for place in places[: len(LANES)]]
    size = data.draw(st.sampled_from([SIZE, None]), label="history")
    for batch in course:
        number = data.draw(st.integers(0, 9), label="number of the batch")
        evict = data.draw(st.booleans(), label="evict")
        keys, lanes, positions, exotic = arrays(batch)
        if doubled:
            lanes = lanes + len(LANES) * (np.arange(len(batch)) % 2)
        wide = np.array([is_wide(message) for message in batch], np.bool_)
        lanes = np.where(wide, lanes % len(LANES) + keyless, lanes)
        judged = judge(keys, lanes, positions, places, histories, exotic)
        fold = judged.fold & ~judged.pure
        found, retired = fold_histories(
            judged,
            keys,
            lanes,
            positions,
            places,
            histories,
            fold=fold,
            size=size,
            most_lanes=MOST_LANES,
            batch=number,
            evict=evict,
        )
        assert sorted(judged.order.tolist()) == list(range(len(batch)))
        assert (np.diff(keys[judged.order]) >= 0).all()
        expected_retired = 0
        for key in range(KEYS):
            rows = [i for i in range(len(batch)) if batch[i][0] == key]
            standings = [standing(batch[i]) for i in rows]
            decisions = histories[key].judge(standings)
            folded = [one for one, decision in zip(standings, decisions, strict=True) if decision.fold]
            after, gone = histories[key].folding(folded, size=size, lanes=MOST_LANES, batch=number, evict=evict)
            exotics = any(is_exotic(batch[i]) for i in rows)
            pure = (
                bool(histories[key].holes) or exotics or crosses_lanes(standings) or is_loose(histories[key], standings)
            )
            assert judged.pure[rows].tolist() == [pure] * len(rows)
            if not pure:
                verdicts = [(VERDICTS[judged.verdicts[i]], bool(judged.fold[i])) for i in rows]
                assert verdicts == decisions
                order = [i for i in judged.order.tolist() if batch[i][0] == key]
                assert order == [rows[i] for i in in_order(standings)]
                assert (key in found) == bool(folded)
                if folded:
                    assert found[key] == after
                    expected_retired += len(gone)
            histories[key] = after
        assert retired == expected_retired
        if batch and data.draw(st.integers(0, 5), label="dead letter") == 0:
            key, *_ = batch[0]
            histories[key] = histories[key].leaving_hole(standing(batch[0]))


@given(st.data())
def test_rows_are_sorted_by_their_columns_and_then_by_arrival(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 20), label="rows")
    numbers = st.integers(-2, 3) | st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)])
    columns = [
        data.draw(st.lists(numbers, min_size=rows, max_size=rows), label="column")
        for _ in range(data.draw(st.integers(1, 3), label="columns"))
    ]
    expected = sorted(range(rows), key=lambda row: [column[row] for column in columns])
    assert sorted_rows([np.array(column, np.int64) for column in columns]).tolist() == expected


def test_all_verdicts_of_a_stage_without_dead_letters_occur_in_the_histories() -> None:
    """The property above would say nothing about a verdict that never comes up."""
    first = [*((0, 2, (offset, 0, 0), False) for offset in range(1, 9)), (0, 3, (2, 1, 0), False)]
    second = [
        (0, 2, (9, 0, 0), False),
        (0, 2, (9, 0, 0), False),
        (0, 2, (8, 0, 0), False),
        (0, 2, (1, 0, 0), False),
        (0, 2, (6, 1, 0), False),
        (0, 0, (3, 0, 0), False),
        (0, 3, (7, 0, 0), False),  # held by another lane of its group
        (0, 2, (2, 1, 0), False),  # the same, and below its own lane's floor
    ]
    places = [Lane(lane, group_of(lane)) for lane in LANES]
    held: list[Histories] = [Histories()]
    seen = []
    for batch in (first, second):
        keys, lanes, positions, exotic = arrays(batch)
        judged = judge(keys, lanes, positions, places, held, exotic)
        seen = [VERDICTS[number] for number in judged.verdicts]
        found, _ = fold_histories(judged, keys, lanes, positions, places, held, fold=judged.fold, size=SIZE)
        held = [found[0]]
    assert seen == [
        Verdict.ACCEPTED,
        Verdict.DUPLICATE_IN_BATCH,
        Verdict.DUPLICATE,
        Verdict.BELOW_FLOOR,
        Verdict.LATE,
        Verdict.NEW_LANE,
        Verdict.DUPLICATE,
        Verdict.DUPLICATE,
    ]

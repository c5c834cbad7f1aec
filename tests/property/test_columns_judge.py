"""Verdicts and histories of whole batches against the pure code, over courses of batches."""

from contextlib import ExitStack
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.columns.judge import VERDICTS, HistoryLimits, Judged, judge
from aggregations.columns.lane_names import LaneNames
from aggregations.columns.order import sorted_rows
from aggregations.columns.record_text import WHOLE
from aggregations.columns.records import StoredStates, encoded, form_of
from aggregations.columns.schema import MISSING
from aggregations.columns.signature import Lane
from envelope import Histories, History, Standing, Verdict
from envelope.dedup.eviction import GrowthFullError
from envelope.dedup.histories import in_order
from envelope.dedup.lanes import group_of
from envelope.dedup.lineage import NO_INDEX
from persistence.names import FlowRef
from persistence.record import StateRecord, decode_record, encode_record

LANES = ["a:0#i", "b:1#i>r>c:1", "a:0#i>r>b:0", "a:0#i>r>b:1", "a:1#i>r>b:0", "a:0#i>s>b", "a:0#i>s>b>r>c"]
WIDTHS = [1, 2, 2, 2, 2, 2, 3]
KEYLESS = [False, False, True, False, True, False, False]
SIZE, MOST_LANES, KEYS = 4, 3, 3
GROWTH = 8
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


def is_unusual(histories: Histories) -> bool:
    """Whether arrays cannot express the histories: see `aggregations.columns.record_text`."""
    return bool(histories.holes) or any(one.loose or not (one.held or one.used) for one in histories.lanes.values())


def crowds(histories: Histories, folded: list[Standing]) -> bool:
    return bool(folded) and len(histories.lanes.keys() | {one.lane for one in folded}) > MOST_LANES


FORM = form_of("d", ["n"], [WHOLE])


class Keys:
    """States of a few keys, as a store keeps them."""

    def __init__(self) -> None:
        self.names = LaneNames()
        self.values: list[bytes | None] = [None] * KEYS

    def load(self) -> StoredStates:
        return StoredStates(self.values, FORM, self.names)

    def put(self, key: int, histories: Histories) -> None:
        state = StateRecord("d", {"n": 1}, histories)
        self.values[key] = encode_record(state) if histories.lanes or histories.holes else None

    def after(self, judged: Judged, stored: StoredStates) -> dict[int, Histories]:
        """The histories that a batch leaves, from the text that would be stored."""
        values = stored.values.of_keys(judged.changed)
        records = encoded(FORM, self.names, judged.lanes, np.arange(len(judged.changed)), values, b"")
        return {
            key: decode_record(record, FlowRef("f").stage("s"), b"").histories
            for key, record in zip(judged.changed.tolist(), records, strict=True)
        }


@settings(max_examples=5 * settings.default.max_examples)
@given(courses(), st.booleans(), st.data())
def test_every_verdict_and_every_history_is_that_of_the_pure_code(
    course: list[list[Message]], doubled: bool, data: st.DataObject
) -> None:
    limits = {"history.HISTORY": 2, "history.WIDE": 5, "histories.GROWTH": GROWTH}
    with ExitStack() as stack:
        for name, limit in limits.items():
            stack.enter_context(patch(f"envelope.dedup.{name}", limit))
        stack.enter_context(patch("aggregations.columns.judge.GROWTH", GROWTH))
        judge_both_ways(course, doubled, data)


def judge_both_ways(course: list[list[Message]], doubled: bool, data: st.DataObject) -> None:
    histories, states = [Histories() for _ in range(KEYS)], Keys()
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
        refused = np.array(
            [data.draw(st.integers(0, 40), label="refused") == 7 for _ in batch]
            if size is None
            else [False] * len(batch),
            np.bool_,
        )
        stored = states.load()
        judged = judge(
            keys,
            lanes,
            positions,
            places,
            stored.lanes,
            states.names,
            HistoryLimits.of(size, MOST_LANES, number, evict=evict),
            pure=stored.other,
            exotic=exotic,
            refused=refused,
        )
        found = states.after(judged, stored)
        assert sorted(judged.order.tolist()) == list(range(len(batch)))
        assert (np.diff(keys[judged.order]) >= 0).all()
        for key in range(KEYS):
            rows = [i for i in range(len(batch)) if batch[i][0] == key]
            standings = [standing(batch[i]) for i in rows]
            decisions = histories[key].judge(standings)
            folded = [one for one, decision in zip(standings, decisions, strict=True) if decision.fold]
            try:
                after, _ = histories[key].folding(folded, size=size, lanes=MOST_LANES, batch=number, evict=evict)
                is_full = False
            except GrowthFullError:
                after, is_full = histories[key], True
            assert bool(stored.other[key]) == is_unusual(histories[key])
            pure = (
                is_unusual(histories[key])
                or any(is_exotic(batch[i]) for i in rows)
                or crowds(histories[key], folded)
                or is_full
                or any(refused[i] and decision.fold for i, decision in zip(rows, decisions, strict=True))
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
            histories[key] = after
            states.put(key, after)
        if batch and data.draw(st.integers(0, 5), label="dead letter") == 0:
            key, *_ = batch[0]
            histories[key] = histories[key].leaving_hole(standing(batch[0]))
            states.put(key, histories[key])


def test_a_lane_whose_positions_had_other_components_is_left_to_the_pure_code() -> None:
    """They had, if the definition changed: for example by a flat-map before the stage."""
    states, batch = Keys(), [(key, 6, (5, 0, 1), False) for key in range(2)]
    for key, position in enumerate([(4, 0), (4, 0, 1)]):
        states.put(key, Histories({LANES[6]: History((position,), used=1)}))
    keys, lanes, positions, none = arrays(batch)
    stored, places = states.load(), [Lane(lane, group_of(lane)) for lane in LANES]
    given = keys, lanes, positions, places, stored.lanes, states.names, HistoryLimits.of(SIZE)
    judged = judge(*given, pure=np.zeros(KEYS, np.bool_), exotic=none, refused=none)
    assert judged.pure.tolist() == [True, False]
    assert states.after(judged, stored)[1].lanes[LANES[6]].held == ((4, 0, 1), (5, 0, 1))


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
    states = Keys()
    seen = []
    for batch in (first, second):
        keys, lanes, positions, exotic = arrays(batch)
        stored, none = states.load(), np.zeros(len(batch), np.bool_)
        limits = HistoryLimits.of(SIZE)
        judged = judge(
            keys,
            lanes,
            positions,
            places,
            stored.lanes,
            states.names,
            limits,
            pure=none[:KEYS],
            exotic=exotic,
            refused=none,
        )
        seen = [VERDICTS[number] for number in judged.verdicts]
        for key, histories in states.after(judged, stored).items():
            states.put(key, histories)
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

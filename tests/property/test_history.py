"""The histories against an oracle that remembers every position ever folded."""

from hypothesis import given, settings
from hypothesis import strategies as st

from envelope import Histories, Standing, Verdict
from envelope.dedup.lanes import group_of

LANES = ["a:0#i", "a:1#i", "a:0#i>r>b:0", "a:0#i>r>b:1", "a:0#i>s>b"]
SIZE = 4


def standing(lane: str, *position: int) -> Standing:
    return Standing(lane, group_of(lane), position)


def run(batches: list[list[Standing]], size: int = SIZE) -> tuple[list[tuple[Standing, Verdict, bool]], Histories]:
    histories, log = Histories(), []
    for number, batch in enumerate(batches):
        decisions = histories.judge(batch)
        log += [(one, decision.verdict, decision.fold) for one, decision in zip(batch, decisions, strict=True)]
        folded = [one for one, decision in zip(batch, decisions, strict=True) if decision.fold]
        histories, _ = histories.folding(folded, size=size, batch=number)
    return log, histories


# -1 represents a missing index.
standings = st.builds(standing, st.sampled_from(LANES), st.integers(0, 12), st.integers(-1, 2), st.integers(-1, 1))
batches = st.lists(st.lists(standings, max_size=8), max_size=8)


@settings(max_examples=4 * settings.default.max_examples)
@given(batches)
def test_nothing_is_ever_folded_twice_within_a_lane(course: list[list[Standing]]) -> None:
    log, _ = run(course)
    folded = [(one.lane, one.position) for one, _, fold in log if fold]
    assert len(folded) == len(set(folded))


@settings(max_examples=4 * settings.default.max_examples)
@given(batches)
def test_a_duplicate_was_folded_before_and_everything_else_dropped_is_below_the_floor(
    course: list[list[Standing]],
) -> None:
    log, _ = run(course)
    seen: set[tuple[str, tuple[int | str, ...]]] = set()
    batch_start = 0
    for batch in course:
        entries = sorted(
            log[batch_start : batch_start + len(batch)], key=lambda entry: (entry[0].position, entry[0].lane)
        )
        batch_start += len(batch)
        for one, verdict, fold in entries:
            if verdict in (Verdict.DUPLICATE, Verdict.DUPLICATE_IN_BATCH):
                assert (one.group, one.position) in seen
            assert fold or verdict in (Verdict.DUPLICATE, Verdict.DUPLICATE_IN_BATCH, Verdict.BELOW_FLOOR)
            if fold:
                seen.add((one.group, one.position))


@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_disorder_of_fewer_positions_than_the_history_loses_nothing_and_replays_double_nothing(
    data: st.DataObject,
) -> None:
    offsets = list(range(data.draw(st.integers(1, 20), label="messages")))
    # First deliveries in order up to a displacement below the history, then any rewinds.
    order = sorted(offsets, key=lambda offset: (offset + data.draw(st.integers(0, SIZE - 1), label="delay"), offset))
    deliveries: list[int] = []
    for offset in order:
        deliveries.append(offset)
        if data.draw(st.booleans(), label="rewind"):
            back = data.draw(st.integers(0, len(deliveries) - 1), label="to")
            deliveries += deliveries[back:]
    course: list[list[Standing]] = [[]]
    for offset in deliveries:
        if data.draw(st.booleans(), label="border"):
            course.append([])
        course[-1].append(standing("a:0#i", offset))
    log, _ = run(course)
    assert sorted(one.position[0] for one, _, fold in log if fold) == offsets


@settings(max_examples=3 * settings.default.max_examples)
@given(batches)
def test_judging_a_batch_message_by_message_decides_the_same(course: list[list[Standing]]) -> None:
    """What a batch adds changes nothing for what comes after it in the batch: so a batch may be judged at once."""
    histories = Histories()
    for number, batch in enumerate(course):
        at_once = [decision.fold for decision in histories.judge(batch)]
        one_by_one, current = [False] * len(batch), histories
        for i in sorted(range(len(batch)), key=lambda i: (batch[i].position, batch[i].lane)):
            [decision] = current.judge([batch[i]])
            one_by_one[i] = decision.fold
            if decision.fold:
                current, _ = current.folding([batch[i]], size=SIZE, batch=number)
        assert at_once == one_by_one
        histories = current


@settings(max_examples=3 * settings.default.max_examples)
@given(st.data())
def test_siblings_without_an_index_are_folded_once_wherever_batches_end(data: st.DataObject) -> None:
    """Roots rise, their siblings come in any order over the lanes of a group, and all of it comes again from anywhere."""
    group, lanes = "a:0#i>r>b", ["a:0#i>r>b:0", "a:0#i>r>b:1"]
    counts = data.draw(st.lists(st.integers(0, 2 * SIZE), min_size=1, max_size=8), label="siblings of each root")
    roots = [
        [Standing(data.draw(st.sampled_from(lanes)), group, (root, -1, f"id{n}")) for n in range(count)]
        for root, count in enumerate(counts)
    ]
    deliveries: list[Standing] = []
    for root, siblings in enumerate(roots):
        deliveries += data.draw(st.permutations(siblings), label="order")
        if data.draw(st.booleans(), label="rewind"):
            back = data.draw(st.integers(0, root), label="to")
            deliveries += [one for again in roots[back : root + 1] for one in again[::-1]]
    course: list[list[Standing]] = [[]]
    for one in deliveries:
        if data.draw(st.integers(0, 3), label="border") == 0:
            course.append([])
        course[-1].append(one)
    log, histories = run(course, size=data.draw(st.integers(1, SIZE), label="history"))
    assert sorted(one.position for one, _, fold in log if fold) == sorted(
        one.position for root in roots for one in root
    )
    for history in histories.lanes.values():
        assert len({position[0] for position in history.held}) <= SIZE

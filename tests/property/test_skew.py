"""Bounded skew: partitions that are behind in event time are read first, everything is read, and nothing waits for ever."""

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.engine.ranges import Range, aligned, within
from envelope import TopicPartition

SECOND = 1_000_000
SKEWS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from([1, 60, 600]))
PLACES = [TopicPartition(topic, partition) for topic in ("a", "b", "c") for partition in (0, 1)]


@st.composite
def backlogs(draw: st.DrawFn) -> list[Range]:
    found = []
    for place in draw(st.lists(st.sampled_from(PLACES), unique=True).map(sorted)):
        start = draw(st.integers(0, 50))
        found.append(Range(place.partition, start, start + draw(st.integers(1, 40)), place.topic))
    return found


REACHED = st.dictionaries(st.sampled_from(PLACES), st.integers(-1_000, 1_000).map(lambda seconds: seconds * SECOND))


@settings(max_examples=3 * settings.default.max_examples)
@given(backlog=backlogs(), most=st.integers(0, 100), reached=REACHED, skews=SKEWS)
def test_a_partition_is_read_only_if_those_that_are_too_far_behind_it_are_read_to_their_ends(
    backlog: list[Range], most: int, reached: Mapping[TopicPartition, int], skews: Mapping[str, int]
) -> None:
    found = {one.place: one for one in aligned(backlog, most, reached, skews)}
    assert list(found) == [one.place for one in backlog if one.place in found]
    assert bool(found) == bool(backlog)
    whole = {one.place: one for one in backlog}
    for place, one in found.items():
        assert one.start == whole[place].start < one.end <= whole[place].end
    if most:
        assert sum(one.end - one.start for one in found.values()) <= most + len(found)
    else:
        assert found == whole
    for place in whole.keys() & reached.keys() & {one for one in PLACES if one.topic in skews}:
        behind = [
            other
            for other in whole.keys() & reached.keys()
            if reached[place] - reached[other] > skews[place.topic] * SECOND
        ]
        if place in found:
            assert all(found.get(other) == whole[other] for other in behind)


@settings(max_examples=3 * settings.default.max_examples)
@given(backlog=backlogs(), most=st.integers(0, 100), reached=REACHED, skews=SKEWS)
def test_a_partition_waits_only_for_one_that_is_too_far_behind_it_or_for_room(
    backlog: list[Range], most: int, reached: Mapping[TopicPartition, int], skews: Mapping[str, int]
) -> None:
    found = {one.place: one for one in aligned(backlog, most, reached, skews)}
    left = [one.place for one in backlog if one.place not in found]
    times = [reached[one.place] for one in backlog if one.place in reached]
    for place in left:
        assert place in reached
        assert reached[place] - min(times) > skews[place.topic] * SECOND
    if left:
        assert sum(one.end - one.start for one in found.values()) >= most - len(found)


@given(backlog=backlogs(), most=st.integers(0, 100), reached=REACHED)
def test_without_a_limit_every_partition_gets_its_share(
    backlog: list[Range], most: int, reached: Mapping[TopicPartition, int]
) -> None:
    assert aligned(backlog, most, reached, {}) == within(backlog, most)


LOGS = st.dictionaries(
    st.sampled_from(PLACES), st.lists(st.one_of(st.none(), st.integers(-300, 300)), min_size=1, max_size=30), min_size=1
)


@given(logs=LOGS, most=st.integers(0, 12), skews=SKEWS, data=st.data())
def test_all_records_are_read_also_while_more_arrive_and_where_times_are_missing_or_go_back(
    logs: dict[TopicPartition, list[int | None]], most: int, skews: dict[str, int], data: st.DataObject
) -> None:
    there = {place: data.draw(st.integers(0, len(log))) for place, log in logs.items()}
    position = dict.fromkeys(logs, 0)
    reached: dict[TopicPartition, int] = {}
    batches = 0
    while True:
        backlog = [
            Range(place.partition, position[place], there[place], place.topic)
            for place in sorted(logs)
            if position[place] < there[place]
        ]
        found = aligned(backlog, most, reached, skews)
        assert bool(found) == bool(backlog)
        for one in found:
            times = [time for time in logs[one.place][one.start : one.end] if time is not None]
            if times:
                reached[one.place] = max([reached.get(one.place, times[0] * SECOND), *(t * SECOND for t in times)])
            position[one.place] = one.end
        batches += 1
        if not backlog and there == {place: len(log) for place, log in logs.items()}:
            break
        for place, log in logs.items():
            there[place] = min(there[place] + data.draw(st.integers(0 if backlog else 1, 5)), len(log))
    assert position == {place: len(log) for place, log in logs.items()}
    assert batches <= 2 + 2 * sum(map(len, logs.values()))


def test_a_topic_without_a_limit_holds_others_back_and_is_never_held_back() -> None:
    slow, fast = Range(0, 0, 100, "a"), Range(0, 0, 100, "b")
    reached = {slow.place: 0, fast.place: 61 * SECOND}
    assert aligned([slow, fast], 10, reached, {"b": 60}) == [slow._replace(end=10)]
    assert aligned([slow, fast], 10, reached, {"a": 60}) == [slow._replace(end=5), fast._replace(end=5)]
    assert aligned([slow._replace(end=4), fast], 10, reached, {"b": 60}) == [slow._replace(end=4), fast._replace(end=6)]

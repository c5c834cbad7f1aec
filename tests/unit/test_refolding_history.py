"""Which offsets are folded again, and when that is refused."""

from typing import Any

import pytest

from aggregations.definition.flow import Flow
from aggregations.errors import DefinitionChangedError, RunRefusedError
from envelope import TopicPartition
from jobs.environment import UsageError
from jobs.explaining.log import Log, Span
from jobs.refolding.history import History, chosen, recorded
from persistence.kafka import TopicMissing
from persistence.manifest import Manifest, Progress, Rebuilt
from tests.support.pure import FLEET, bare, fleet
from tests.unit.test_lookups import by_category

FLOW = fleet()


class Logs:
    """What a cluster has: a reader that needs no broker.

    Args:
        logs: First offset and end by partition, by topic.
        topic_id: Id of every topic.
    """

    def __init__(self, topic_id: str = "T1", /, **logs: dict[int, tuple[int, int]]) -> None:
        self._logs, self._topic_id = logs, topic_id

    def log(self, topic: str) -> Log:
        if topic not in self._logs:
            raise TopicMissing(f"topic {topic} does not exist", "Create it")
        marks = self._logs[topic]
        low, high = ({partition: one[i] for partition, one in marks.items()} for i in (0, 1))
        return Log(topic, self._topic_id, low, high, high)

    def archived(self, span: Span) -> int:
        return 0

    def offsets_at(self, topic: str, time_ms: int) -> dict[int, int]:
        """Offsets are seconds since 1970."""
        return {at: min(max(time_ms // 1000, low), high) for at, (low, high) in self._logs[topic].items()}


def live(*ends: int, **fields: Any) -> Manifest:
    """A manifest with these next offsets of `legs`."""
    positions = {"legs": {partition: Progress(end) for partition, end in enumerate(ends)}}
    return Manifest(1, 1, **{"positions": positions, "topic_ids": {"legs": "T1"}, **fields})


def both(history: History) -> dict[int, tuple[int, int]]:
    """First and end offset by partition of `legs`."""
    return {at: (first, history.end["legs"][at]) for at, first in history.first["legs"].items()}


def find(manifest: Manifest, begun: Manifest | None = None, *, flow: Flow[Any] = FLOW, **logs: Any) -> History:
    reader: Any = Logs(logs.pop("topic_id", "T1"), **(logs or {"legs": {0: (0, 100), 1: (0, 100)}}))
    return recorded(flow, manifest, begun, reader)


def test_the_history_of_live_states_goes_from_the_start_to_where_they_end() -> None:
    assert both(find(live(40, 0))) == {0: (0, 40), 1: (0, 0)}
    assert both(find(live(40, 30, starting_offsets={"legs": {0: 7}}))) == {0: (7, 40), 1: (0, 30)}
    assert both(find(live(40, 30), live(9, 30))) == {0: (9, 40), 1: (30, 30)}
    # A partition that was added is read from its beginning, one that the flow has not read is not read.
    assert both(find(live(40, 30), live(9), legs={0: (5, 60), 1: (0, 60), 2: (3, 8)})) == {
        0: (9, 40),
        1: (0, 30),
        2: (3, 3),
    }
    # Nothing is read of a partition that had nothing new, although its records are deleted.
    assert both(find(live(40, 40), live(40, 9), legs={0: (50, 60), 1: (9, 60)})) == {0: (50, 50), 1: (9, 40)}


@pytest.mark.parametrize(
    ("manifest", "begun", "logs", "said"),
    [
        (live(40), None, {"legs": {0: (3, 90)}}, "began at the beginning of the log, but the records before 3"),
        (live(40, starting_offsets={"legs": {0: 2}}), None, {"legs": {0: (3, 90)}}, "the flow began at 2"),
        (
            live(40, rebuilt=Rebuilt(1, 0, "ann", "", continues=(1,))),
            None,
            {},
            "began with a snapshot of generation 1, .* made since",
        ),
        (live(40), live(2), {"legs": {0: (3, 90)}}, "the snapshot ends at 2, .* later snapshot"),
        (live(40), live(41), {"legs": {0: (0, 90)}}, "the snapshot ends at 41, after the live states, at 40"),
        (live(40), None, {"legs": {0: (0, 39)}}, "folded up to 40, but its log ends at 39"),
        (live(40, 5), None, {"legs": {0: (0, 90)}}, "legs:1 is folded up to 5, but its log ends at 0"),
        (live(40), None, {"legs": {0: (0, 90)}, "topic_id": "T2"}, "created again"),
        (live(40, incarnations={"legs": ("T0", "T1")}), None, {"legs": {0: (0, 90)}}, "created again"),
        (live(40), live(9, topic_ids={"legs": "T0"}), {"legs": {0: (0, 90)}}, "created again"),
        (live(40), None, {"others": {}}, "legs does not exist"),
    ],
)
def test_a_history_that_is_not_known_or_not_there_is_refused(
    manifest: Manifest, begun: Manifest | None, logs: Any, said: str
) -> None:
    with pytest.raises(RunRefusedError, match=said) as refused:
        find(manifest, begun, **logs)
    assert "\n" not in str(refused.value)


def test_states_of_an_earlier_definition_begin_with_a_snapshot() -> None:
    changed = live(40, earlier={"carrier": ("other",)})
    with pytest.raises(DefinitionChangedError, match="stage carrier"):
        find(changed)
    assert both(find(changed, live(7)))[0] == (7, 40)
    assert both(find(live(40, incarnations={"legs": ("T0", "T1")}), live(7)))[0] == (7, 40)
    source = Flow("fleet").source(bare()).aggregate("aircraft", "tail", FLEET)
    fewer = live(40, earlier={"aircraft": (source.definitions["aircraft"],)})
    assert both(find(fewer, flow=source))[0] == (0, 40)


def choose(*ranges: str, flow: Flow[Any] = FLOW, **logs: Any) -> History:
    reader: Any = Logs(**(logs or {"legs": {0: (10, 100), 1: (0, 50)}}))
    return chosen(ranges, [flow], reader)


def test_a_range_is_read_and_nothing_else() -> None:
    assert both(choose()) == {0: (10, 100), 1: (0, 50)}
    assert both(choose("legs:0:20-29")) == {0: (20, 30), 1: (0, 0)}
    assert choose("legs:0:20-29").ends(FLOW) == {TopicPartition("legs", 0): 30, TopicPartition("legs", 1): 0}
    assert both(choose("legs:0:20-29", "legs:1")) == {0: (20, 30), 1: (0, 50)}
    assert both(choose("legs:0:20-29", "legs:0:25-40")) == {0: (20, 41), 1: (0, 0)}
    assert both(choose("1970-01-01T00:00:20Z/1970-01-01T00:00:30Z")) == {0: (20, 30), 1: (20, 30)}
    assert both(choose("/1970-01-01T00:00:30Z")) == {0: (10, 30), 1: (0, 30)}
    assert choose("legs:0:20-29").records == 10


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        (["legs:0:9-20"], "its log begins at 10"),
        (["legs:1:49-50"], "its last record is 49"),
        (["legs:1:50-60"], "ends before offset 50"),
        (["legs:1:20-10"], "reversed"),
        (["legs:2"], "partitions 0 to 1"),
        (["other"], "the flow reads legs"),
        (["legs:0:20-29", "legs:0:31-40"], "several ranges"),
        (["1970-01-01T00:00:10Z/"], "the log of legs:0 begins at 10"),
        (["1970-01-01T00:00:30Z/1970-01-01T00:00:20Z"], "reversed"),
    ],
)
def test_a_range_that_the_topics_do_not_have_is_refused(ranges: list[str], said: str) -> None:
    with pytest.raises(RunRefusedError, match=said) as refused:
        choose(*ranges)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["legs:0:x", "legs:0:1-", "yesterday/"])
def test_a_malformed_range_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match="--range"):
        choose(text)


def test_tables_are_read_whole_unless_they_are_named() -> None:
    logs: Any = {"payments": {0: (0, 90)}, "merchants": {0: (5, 60)}}
    for ranges, expected in (
        (["payments:0:1-9"], (5, 60)),
        (["1970-01-01T00:00:20Z/"], (5, 60)),
        (["payments:0:1-9", "merchants:0:7-8"], (7, 9)),
    ):
        found = choose(*ranges, flow=by_category(), **logs)
        assert (found.first["merchants"][0], found.end["merchants"][0]) == expected

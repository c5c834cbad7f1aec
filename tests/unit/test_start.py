"""Where a flow begins to read a topic that it has never read."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from aggregations.errors import FlowError
from aggregations.run.begin import begin
from aggregations.run.common import common
from aggregations.run.plan import Broker, Plan, plan
from aggregations.run.start import checked, offsets, parse
from envelope import TopicPartition
from persistence.commit import faults
from persistence.manifest import Manifest, Progress, decode_manifest, encode_manifest
from tests.support.two_stages import flow, two_stores

MARKS = {0: (10, 100), 1: (0, 40)}


class Crash(BaseException):
    pass


def test_text_is_a_word_a_time_or_offsets() -> None:
    assert parse("latest") == "latest"
    assert parse("0:12,3:7") == {0: 12, 3: 7}
    assert parse("2013-01-02T03:04:05+02:00") == datetime(2013, 1, 2, 1, 4, 5, tzinfo=UTC)
    assert checked("1:5") == {1: 5}
    aware = datetime(2013, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert checked(aware) is aware


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ("newest", "start='newest': it takes earliest, latest, a time with its zone"),
        ("", "start='': it takes earliest"),
        ("0:1,", "start='0:1,': it takes earliest"),
        ("0:1,0:2", "names partition 0 twice"),
        ("2013-01-02T03:04:05", "has no time zone; append Z"),
        (datetime(2013, 1, 2), "has no time zone"),
        (datetime.now(UTC) + timedelta(days=1), "is in the future"),
        ({}, "an offset of 0 or greater for every partition"),
        ({0: -1}, "an offset of 0 or greater"),
        ({0: True}, "an offset of 0 or greater"),
        (17, "got a int"),
    ],
)
def test_what_is_no_start_position_is_refused(start: Any, text: str) -> None:
    with pytest.raises(FlowError, match=text):
        checked(start)


def at(found: dict[int, int]) -> Any:
    def ask(time_ms: int) -> dict[int, int]:
        assert time_ms == 1_500
        return found

    return ask


def test_every_form_becomes_an_offset_of_each_partition() -> None:
    assert offsets("earliest", "t", MARKS, at({})) == {0: 10, 1: 0}
    assert offsets("latest", "t", MARKS, at({})) == {0: 100, 1: 40}
    assert offsets({0: 10, 1: 40}, "t", MARKS, at({})) == {0: 10, 1: 40}
    when = datetime.fromtimestamp(1.5, UTC)
    assert offsets(when, "t", MARKS, at({0: 30, 1: -1})) == {0: 30, 1: 40}, "without such a record the end"
    assert offsets(when, "t", MARKS, at({0: 30, 1: 44})) == {0: 30, 1: 40}, "not beyond an open transaction"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({0: 10}, "partitions 0 of t, which has partitions 0, 1; give all of them"),
        ({0: 10, 1: 0, 2: 0}, "partitions 0, 1, 2 of t"),
        ({0: 9, 1: 0}, "start=0:9: the log of t:0 is 10 to 100"),
        ({0: 10, 1: 41}, "start=1:41: the log of t:1 is 0 to 40"),
    ],
)
def test_offsets_that_the_topic_does_not_have_are_refused(given: dict[int, int], text: str) -> None:
    with pytest.raises(FlowError, match=text):
        offsets(given, "t", MARKS, at({}))


def planned(stored: Manifest | None, topic_id: str = "one") -> tuple[Plan, int]:
    asked = []

    def told() -> dict[int, int]:
        asked.append(1)
        return {0: 60, 1: 40}

    return plan("flow", stored, [("s", stored)], Broker("t", topic_id, MARKS), starting_offsets=told), len(asked)


def test_a_flow_that_never_ran_begins_where_it_is_told_and_the_plan_shows_what_it_skips() -> None:
    found, asked = planned(None)
    assert (found.starts, found.starting_offsets, asked) == ({0: 60, 1: 40}, {0: 60, 1: 40}, 1)
    assert [one.skipped for one in found.partitions] == [50, 40]
    assert not found.start_unused
    assert "partition 0: starts at 60 as given, skipping 50 offsets; manifests: s -;" in found.lines()[1]


def test_a_flow_that_has_begun_goes_on_and_the_offsets_are_not_even_checked() -> None:
    """They may have expired since: a restart with the same options must work."""
    found, asked = planned(Manifest(1, 1, {"t": {0: Progress(70)}}, {"t": "one"}, {"t": ("one",)}))
    assert (found.starts, found.starting_offsets, asked) == ({0: 70, 1: 0}, None, 0)
    assert "the start position is not used: the flow has begun" in "\n".join(found.lines())


def test_a_topic_that_was_created_again_is_read_from_its_beginning() -> None:
    found, asked = planned(Manifest(1, 1, {"t": {0: Progress(70)}}, {"t": "zero"}, {"t": ("zero",)}))
    assert (found.starts, asked) == ({0: 10, 1: 0}, 0)
    assert found.start_unused


def test_the_stores_keep_the_start_from_the_first_write_on_and_through_batches() -> None:
    stores = two_stores()
    run = begin(flow(), stores)
    run.start_at("legs", "T1", {0: 60}, starting_offsets={0: 60})
    run.close()
    run = begin(flow(), stores)
    assert run.positions("legs") == {0: 60}
    run.start_at("legs", "T1", {0: 60})
    after = run.following({TopicPartition("legs", 0): 70, TopicPartition("legs", 1): 5}, {"legs": "T1"}, {})
    assert after.starting_offsets == {"legs": {0: 60}}
    ref = run.ref
    assert decode_manifest(encode_manifest(after), ref) == after
    assert common([after, after], ref).starting_offsets == {"legs": {0: 60}}
    assert run.following({TopicPartition("legs", 0): 1}, {"legs": "T2"}, {}).starting_offsets == {}, (
        "another topic of this name"
    )
    run.close()


def test_a_first_start_that_dies_between_two_stores_leaves_no_start_behind() -> None:
    stores = two_stores()
    run = begin(flow(), stores)

    def crash() -> None:
        raise Crash

    with faults.use(faults.Injector([faults.Fault.parse("epoch.before@2")], crash)), pytest.raises(Crash):
        run.start_at("legs", "T1", {0: 60}, starting_offsets={0: 60})
    run.close()
    run = begin(flow(), stores)
    assert run.positions("legs") == {}, "not every store has it"
    run.start_at("legs", "T1", {0: 0})
    assert run.manifest is not None
    assert run.manifest.starting_offsets == {}
    assert run.positions("legs") == {0: 0}
    run.close()


def test_the_start_in_a_topic_is_forgotten_with_the_topic() -> None:
    stores = two_stores()
    run = begin(flow(), stores)
    run.start_at("legs", "T1", {0: 60}, starting_offsets={0: 60})
    run.start_at("legs", "T2", {0: 0})
    assert run.following({TopicPartition("legs", 0): 1}, {"legs": "T2"}, {}).starting_offsets == {}
    run.close()

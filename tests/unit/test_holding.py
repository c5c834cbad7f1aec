"""Partitions that hold up the closing watermark although they are read to their end."""

from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.per_message.ledger import Changes
from aggregations.run.holding import holders, patience_us
from envelope import TopicPartition
from persistence.manifest import Progress
from tests.support.driver import Driver, report

SECOND = 1_000_000
NOW = 1_700_000_000 * SECOND
QUIET, SILENT = TopicPartition("legs", 1), TopicPartition("legs", 2)


def legs(**given: Any) -> Topic:
    return Topic("legs", Json({"tail": str, "at": int}), time="at", **given)


def flow(topic: Topic | None = None, **given: Any) -> Flow[Any]:
    given = given or {"window": tumbling("5m", lateness="1m")}
    return Flow("fleet").source(topic or legs()).aggregate("aircraft", "tail", Fields(n=count()), **given)


def reached(*times: int | None) -> dict[str, dict[int, Progress]]:
    return {"legs": {partition: Progress(9, time) for partition, time in enumerate(times)}}


def named(of: Flow[Any], *times: int | None, unread: tuple[TopicPartition, ...] = ()) -> list[str]:
    return [str(one) for one in holders(of, reached(*times), unread)]


def test_a_partition_without_an_event_time_is_named_once_another_has_one() -> None:
    assert named(flow(), NOW, None) == ["legs:1 (no event time yet)"]
    assert not named(flow(), None, None)


def test_a_silent_partition_is_named_when_the_others_have_passed_a_window_and_its_lateness() -> None:
    assert not named(flow(), NOW, NOW - 360 * SECOND)
    assert named(flow(), NOW, NOW - 361 * SECOND) == ["legs:1 (at 2023-11-14T22:07:19Z)"]


def test_those_that_are_furthest_behind_come_first() -> None:
    found = holders(flow(), reached(NOW, NOW - 400 * SECOND, None, NOW - 500 * SECOND), ())
    assert [one.place.partition for one in found] == [2, 3, 1]


def test_a_partition_that_has_something_to_read_is_only_lagging() -> None:
    assert named(flow(), NOW, None, None, unread=(QUIET,)) == ["legs:2 (no event time yet)"]


def test_a_topic_whose_partitions_may_be_idle_holds_nothing_up_for_ever() -> None:
    assert not named(flow(legs(idle="10m")), NOW, None)


def test_the_partitions_of_a_table_hold_nothing_up() -> None:
    merchants = Topic("merchants", Json({"category": str}), envelope=False)
    windowed = flow().lookup("merchant", merchants, key="tail")
    assert not holders(windowed, {**reached(NOW), "merchants": {0: Progress(9), 1: Progress(0)}}, ())


def test_what_can_be_due_first_decides_how_far_a_partition_may_be_behind() -> None:
    assert patience_us(flow()) == 360 * SECOND
    assert patience_us(flow(expire_after="1h")) == 3_600 * SECOND
    assert patience_us(flow(window=session("2m", lateness="1m"))) == 180 * SECOND + 1
    both = flow(expire_after="1h").aggregate("minute", "tail", Fields(n=count()), window=tumbling("1m"))
    assert patience_us(both) == 60 * SECOND


def test_a_flow_whose_states_stay_names_nothing() -> None:
    assert not named(Flow("fleet").source(legs()).aggregate("aircraft", "tail", Fields(n=count())), NOW, None)


def one_partition_read(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A run whose first batch reads an event time in one of two partitions."""
    done = report(5, changes=Changes(times={TopicPartition("legs", 0): NOW}))
    return Driver(monkeypatch, flow(), (done, []))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "stay in the stores" in one.getMessage()]


def test_a_run_warns_once_also_while_other_partitions_have_something_to_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = one_partition_read(monkeypatch)
    with caplog.at_level("WARNING", "headwater.engine"):
        driver.commit()
        for _ in range(2):
            driver.engine._note_idle(driver.engine._backlog())
        driver.broker.highs[TopicPartition("legs", 0)] += 5
        driver.engine._note_idle(driver.engine._backlog())
    said = warnings(caplog)
    assert len(said) == 1
    assert "legs:1 (no event time yet). Set Topic('legs', idle='10m')" in said[0]


def test_the_warning_says_that_windows_are_not_published_either(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = report(5, changes=Changes(times={TopicPartition("legs", 0): NOW}))
    driver = Driver(monkeypatch, flow().publish_states("final", on="close"), (done, []))
    with caplog.at_level("WARNING", "headwater.engine"):
        driver.commit()
        driver.engine._note_idle(driver.engine._backlog())
    assert "stay in the stores, and windows are not published, as long as" in warnings(caplog)[0]


def test_a_run_does_not_warn_of_a_partition_that_it_has_still_to_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = one_partition_read(monkeypatch)
    with caplog.at_level("WARNING", "headwater.engine"):
        driver.commit()
        driver.broker.highs[QUIET] += 5
        driver.engine._note_idle(driver.engine._backlog())
    assert not warnings(caplog)

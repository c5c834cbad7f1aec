"""The knowledge of one member of a republisher group: its commits, and the number of partitions."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from jobs.republish import Statistics
from jobs.republish.growth_watch import GrowthWatch
from jobs.republish.offsets import MemberFenced, commit_in_callback, commit_offsets, is_of_another_topic
from persistence.kafka import BrokerError
from persistence.kafka.facts import TopicFacts

PARTS = [TopicPartition("in", 0, 7), TopicPartition("in", 1, 9)]


def committed(*errors: int | None) -> list[bool]:
    """Commit two partitions to a coordinator that answers each with an error, or with none."""
    answers = [
        SimpleNamespace(topic="in", partition=n, error=code and KafkaError(code)) for n, code in enumerate(errors)
    ]
    consumer = SimpleNamespace(commit=lambda offsets, asynchronous: answers)
    return commit_offsets(cast(Consumer, consumer), PARTS, 20, "")


def test_a_partition_that_another_member_has_by_now_is_not_committed_and_the_others_are() -> None:
    assert committed(None, None) == [True, True]
    assert committed(KafkaError.ILLEGAL_GENERATION, None) == [False, True]
    with pytest.raises(BrokerError, match=r"committing the input offsets, in:1: "):
        committed(None, KafkaError.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(MemberFenced):
        committed(KafkaError.FENCED_INSTANCE_ID, None)


@pytest.mark.parametrize("code", [KafkaError.REBALANCE_IN_PROGRESS, KafkaError._STATE, KafkaError._ASSIGNMENT_LOST])
def test_a_commit_that_a_rebalance_overtakes_has_committed_nothing(code: int) -> None:
    def refuse(**_: Any) -> None:
        raise KafkaException(KafkaError(code))

    assert commit_offsets(cast(Consumer, SimpleNamespace(commit=refuse)), PARTS, 20, "") == [False, False]


def test_a_commit_in_a_callback_asks_again_until_the_coordinator_answers() -> None:
    answers: list[Any] = [KafkaError._TIMED_OUT, KafkaError.COORDINATOR_LOAD_IN_PROGRESS]
    answers.append([TopicPartition("in", 0, 7), TopicPartition("in", 1, 3)])
    commits = []

    def asked(parts: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        if isinstance(answer := answers.pop(0), int):
            raise KafkaException(KafkaError(answer))
        return answer  # type: ignore[no-any-return]

    consumer = SimpleNamespace(commit=lambda **given: commits.append(given), committed=asked)
    assert commit_in_callback(cast(Consumer, consumer), PARTS, 20, "") == [True, False]
    assert (commits, answers) == ([{"offsets": PARTS, "asynchronous": True}], [])


def test_a_commit_while_the_consumer_is_closed_is_sent_and_asks_for_nothing() -> None:
    commits: list[Any] = []
    consumer = SimpleNamespace(commit=lambda **given: commits.append(given))  # it would answer nothing
    assert commit_in_callback(cast(Consumer, consumer), PARTS, 20, "", closing=True) == [False, False]
    assert commits == [{"offsets": PARTS, "asynchronous": True}]


def test_an_offset_belongs_to_the_topic_whose_id_it_was_committed_with() -> None:
    for offset, note, other in ((7, "old", True), (7, "new 4", False), (7, "", False), (-1001, "old", False)):
        at = TopicPartition("in", 0, offset, metadata=note)
        assert is_of_another_topic(at, "new") is other


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_a_broker_that_does_not_know_new_partitions_yet_takes_none_away(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("jobs.republish.growth_watch.time", clock)
    watch = GrowthWatch(
        ["in"], group="g", accepted=False, max_age=300, statistics=Statistics(), on_change=lambda: None
    )  # fmt: skip

    def seen(partitions: int, *, after: float = 0, topic_id: str = "T") -> tuple[bool, int]:
        clock.now += after
        return watch.see(TopicFacts("in", topic_id, partitions)), watch.count("in")

    assert seen(2) == (False, 2)
    assert seen(4) == (True, 4)
    assert seen(2) == (False, 4)
    assert seen(2, after=3600) == (False, 4)
    assert seen(8, after=3600) == (True, 8)
    assert seen(1, topic_id="U") == (False, 1)

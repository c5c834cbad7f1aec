"""What the driver makes of its tasks' outcomes: attempts, reports, manifests and group offsets. No Spark is started."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from aggregations.engine.job import Exclusion, Job, TaskReport
from aggregations.engine.ranges import Range, Slot
from aggregations.engine.retry import ATTEMPTS
from aggregations.errors import RunRefusedError, SharedKeyError, SparkEndedError, TasksLostError
from aggregations.run.begin import begin
from envelope import Reason, TopicPartition
from persistence.errors import Conflict, Corrupt, Fenced, Transient
from persistence.kafka import BrokerRefused, BrokerUnavailable
from persistence.kafka.facts import Watermarks
from tests.support.driver import ENDS, Driver, Outcome, flow, report
from tests.support.pure import fresh_store

CAUSE = Exclusion(Reason.FOLD_FAILED, "a fold", hole=True)
A, B, C = (0, "legs", 0, 1), (0, "legs", 1, 2), (1, "legs", 0, 3)
HOUR = 3600.0


def test_reports_of_tasks_add_up_and_topic_ids_keep_their_order() -> None:
    one = report(2, seen={"raw": ("i1", "i2")}, failed={A: CAUSE}, seconds={"fold": 1.0})
    one.counts.verdicts["aircraft"] = Counter(accepted=2)
    one.add(
        report(3, seen={"raw": ("i2", "i3"), "mid": ("m1",)}, failed={B: CAUSE}, seconds={"fold": 2.0, "load": 0.5})
    )
    assert one.counts.records == 5
    assert one.seen == {"raw": ("i1", "i2", "i3"), "mid": ("m1",)}
    assert one.failed == {A: CAUSE, B: CAUSE}
    assert one.seconds == {"fold": 3.0, "load": 0.5}
    assert one.counts.verdicts == {"aircraft": Counter(accepted=2)}


def test_records_whose_items_scatter_are_left_out_of_every_attempt_that_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = report(9, failed={A: CAUSE, B: CAUSE, C: CAUSE})
    driver = Driver(
        monkeypatch,
        flow(scatters=True),
        (report(1, failed={A: CAUSE}), []),
        (TaskReport(), [Transient("no answer")]),
        (report(2, failed={A: CAUSE, B: CAUSE, C: CAUSE}), []),
        (last, []),
    )
    assert driver.attempt() is last
    every = {A: CAUSE, B: CAUSE, C: CAUSE}
    assert [dict(job.attempt.excluded) for job in driver.jobs] == [{}, {A: CAUSE}, {A: CAUSE}, every]
    assert [job.attempt.number for job in driver.jobs] == [1, 1, 2, 2], "leaving a record out is no new attempt"


def test_what_a_stage_could_not_fold_is_no_reason_to_fold_again_where_nothing_scatters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, flow(), (found := report(1, failed={A: CAUSE}), []))
    assert driver.attempt() is found
    assert len(driver.jobs) == 1


def test_a_key_in_two_partitions_moves_the_first_stage_behind_a_shuffle_for_the_rest_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = SharedKeyError("a key is in two partitions", "legs")
    driver = Driver(
        monkeypatch, flow(), (TaskReport(), [shared]), (report(1), []), (report(2), []), (TaskReport(), [shared])
    )
    assert driver.attempt().counts.records == 1
    assert driver.attempt().counts.records == 2
    assert [job.attempt.spread for job in driver.jobs] == [False, True, True]
    with pytest.raises(SharedKeyError):
        driver.attempt()


@pytest.mark.parametrize(
    "failure",
    [Transient("later"), Conflict((b"k",)), BrokerUnavailable("away", "Wait"), TasksLostError("lost")],
    ids=lambda error: type(error).__name__,
)
def test_what_may_pass_is_tried_again_up_to_a_limit_and_then_raised(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Outcome] = [(TaskReport(), [failure])]
    driver = Driver(monkeypatch, flow(), *failed * (ATTEMPTS - 1), (report(1), []))
    assert driver.attempt().counts.records == 1
    assert [job.attempt.number for job in driver.jobs] == list(range(1, ATTEMPTS + 1))
    # The attempt that failed may have persisted some of it.
    assert [job.attempt.doubt for job in driver.jobs] == [{}, *[ENDS] * (ATTEMPTS - 1)]
    driver = Driver(monkeypatch, flow(), *failed * ATTEMPTS)
    with pytest.raises(type(failure)):
        driver.attempt()


@pytest.mark.parametrize(
    "worst", [Fenced("newer"), Corrupt("torn"), RunRefusedError("unsafe")], ids=lambda error: type(error).__name__
)
def test_of_several_failures_the_gravest_decides_and_is_not_tried_again(
    worst: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(monkeypatch, flow(), (TaskReport(), [Transient("later"), worst, Conflict((b"k",))]))
    with pytest.raises(type(worst)):
        driver.attempt()
    assert len(driver.jobs) == 1


def test_a_source_that_was_created_again_is_said_when_tasks_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow(), (TaskReport(), [TasksLostError("lost")]))
    driver.broker.topic_id = "T2"
    with pytest.raises(Exception, match="T2"):
        driver.attempt()


def test_a_batch_s_manifest_has_its_ends_and_the_topic_ids_that_its_tasks_met(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = report(4, seen={"raw": ("i1",)})
    driver = Driver(monkeypatch, flow(), (seen, []), (report(5, seen={"raw": ("i1", "i2"), "mid": ("m",)}), []))
    driver.commit()
    driver.commit()
    found = driver.run.stores["carrier"].load_manifest(driver.run.ref)
    assert found is not None
    assert found.incarnations["raw"] == ("i1", "i2")
    assert found.incarnations["mid"] == ("m",)
    assert driver.run.start == ENDS
    assert dict(driver.jobs[1].progress.incarnations)["raw"] == ("i1",)
    assert [one.records for one in driver.reports] == [4, 5]
    assert (driver.engine.batches.total.counts.records, driver.engine.batches.total.counts.batches) == (9, 2)


def test_the_manifest_of_the_last_stage_s_store_is_written_first(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    urls = {"aircraft": fresh_store(), "carrier": fresh_store()}
    driver = Driver(monkeypatch, flow(), (report(1), []), urls=urls)

    def noting(name: str, save: Callable[..., None]) -> Callable[..., None]:
        def saved(*given: Any, **options: Any) -> None:
            order.append(name)
            save(*given, **options)

        return saved

    for name, store in driver.run.stores.items():
        monkeypatch.setattr(store, "save_manifest", noting(name, store.save_manifest))
    driver.commit()
    assert order == ["carrier", "aircraft"]


def test_a_run_reads_to_the_ends_that_it_found_and_writes_the_group_s_offsets_behind_every_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, flow(), (report(6), []), (report(6), []))
    assert driver.stream(most=10).records == 12
    assert [job.attempt.tasks for job in driver.jobs] == [
        (Slot(0, (Range(0, 0, 4, "legs"),)), Slot(1, (Range(1, 0, 5, "legs"),))),
        (Slot(0, (Range(0, 4, 5, "legs"),)), Slot(1, (Range(1, 5, 7, "legs"),))),
    ]
    assert driver.broker.committed == [("lag", {("legs", 0): 4, ("legs", 1): 5}), ("lag", ENDS)]
    assert driver.run.start == ENDS


def test_a_run_that_finds_nothing_writes_the_group_s_offsets_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow())
    driver.broker.highs = dict.fromkeys(ENDS, 0)
    assert driver.stream().records == 0
    assert driver.broker.committed == [("lag", dict.fromkeys(ENDS, 0))]


def test_an_added_partition_is_read_from_its_beginning_and_an_empty_one_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, flow(), (report(1), []))
    driver.broker.count = 4
    driver.broker.highs |= {TopicPartition("legs", 2): 9, TopicPartition("legs", 3): 0}
    driver.stream()
    assert [one for slot in driver.jobs[0].attempt.tasks for one in slot.ranges if one.partition == 2] == [
        Range(2, 0, 9, "legs")
    ]
    assert driver.run.start == {**ENDS, TopicPartition("legs", 2): 9, TopicPartition("legs", 3): 0}


def test_records_of_an_added_partition_that_were_deleted_unread_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow())
    place = TopicPartition("legs", 2)
    driver.broker.count, driver.broker.highs[place], driver.broker.lows[place] = 3, 9, 4
    with pytest.raises(BrokerRefused, match="legs:2 has offsets 4 to 9, but the next offset to read is 0"):
        driver.stream()


def test_a_partition_that_the_broker_does_not_know_yet_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow(), (report(1), []))
    marks, answers = driver.broker.marks, []

    def lagging(names: Sequence[str]) -> dict[TopicPartition, Watermarks]:
        answers.append(names)
        return dict(list(marks(names).items())[: len(answers)])

    monkeypatch.setattr(driver.broker, "marks", lagging)
    assert driver.stream().records == 1
    assert driver.run.start == ENDS


@pytest.mark.parametrize(("low", "high"), [(3, 9), (0, 1)], ids=["deleted", "cut off"])
def test_offsets_that_the_topic_does_not_have_end_the_run(low: int, high: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow())
    driver.run.start_at("legs", "T1", {0: 2, 1: 0})
    place = TopicPartition("legs", 0)
    driver.broker.lows[place], driver.broker.highs[place] = low, high
    with pytest.raises(BrokerRefused, match=f"legs:0 has offsets {low} to {high}, but the next offset to read is 2"):
        driver.stream()


def test_a_source_that_was_created_again_is_said_when_its_offsets_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, flow())
    driver.run.start_at("legs", "T1", {0: 2, 1: 0})
    driver.broker.topic_id, driver.broker.highs[TopicPartition("legs", 0)] = "T2", 1
    with pytest.raises(RunRefusedError, match="T2"):
        driver.stream()


def test_group_offsets_that_the_broker_refuses_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow(), (report(1), []))
    driver.broker.fails = BrokerUnavailable("away", "Wait")
    assert driver.stream().records == 1


def test_a_run_that_is_told_to_stop_does_not_wait_to_try_a_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow(), (TaskReport(), [Transient("later")]))
    execute = driver.engine.batches._executor.execute

    def stopped(job: Job) -> Outcome:
        driver.stop.set()
        return execute(job)

    monkeypatch.setattr(driver.engine.batches._executor, "execute", stopped)
    before = driver.run.stores["carrier"].load_manifest(driver.run.ref)
    assert driver.stream().records == 0
    assert driver.run.stores["carrier"].load_manifest(driver.run.ref) == before, "nor is a clean end noted"


def test_a_key_in_two_partitions_is_a_growth_from_the_next_attempt_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedKeyError("a key is in two partitions", "legs")
    driver = Driver(monkeypatch, flow(), (TaskReport(), [shared]), (report(1), []), (report(1), []))
    driver.attempt()  # and no manifest: the run may die here
    assert [job.progress.evict for job in driver.jobs] == [True, False]
    assert not begin(driver.run.flow, driver.run.urls).evicts


def test_partitions_that_were_added_are_seen_before_their_batch_is_folded_and_written_down_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, flow(), (report(1), []))
    driver.broker.count = 3
    driver.commit()
    assert [job.progress.evict for job in driver.jobs] == [False]
    assert driver.run.manifest is not None
    growth = driver.run.manifest.growth["legs"]
    assert (growth.partitions_before, growth.partitions_now) == (2, 3)


def test_a_batch_that_takes_longer_than_a_stop_waits_is_cancelled_and_left_to_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, flow())
    cancelled = threading.Event()

    def execute(_job: Job) -> Outcome:
        driver.stop.set()
        assert cancelled.wait(60)
        return TaskReport(), [TasksLostError("the job was cancelled")]

    monkeypatch.setattr("aggregations.engine.engine._STOP_SECONDS", 0.01)
    action = SimpleNamespace(routes=2, is_local=True, execute=execute, cancel=cancelled.set)
    monkeypatch.setattr(driver.engine.batches, "_executor", action)
    before = driver.run.stores["carrier"].load_manifest(driver.run.ref)
    assert driver.stream().records == 0
    assert driver.run.stores["carrier"].load_manifest(driver.run.ref) == before, "nor is a clean end noted"


def test_a_jvm_that_ends_is_an_error_unless_the_run_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow())
    stops = [False, True]

    def execute(_job: Job) -> Outcome:
        if stops.pop(0):
            driver.stop.set()
        raise SparkEndedError("Spark's JVM ended")

    monkeypatch.setattr(driver.engine.batches, "_executor", SimpleNamespace(routes=2, is_local=True, execute=execute))
    with pytest.raises(SparkEndedError):
        driver.stream()
    assert driver.stream().records == 0
    assert stops == []


def test_a_batch_that_fails_ends_the_run_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow(), (report(), [Corrupt("a state")]))
    with pytest.raises(Corrupt, match="a state"):
        driver.stream()
    assert len(driver.jobs) == 1


def test_the_rest_of_a_backlog_is_read_at_once_whatever_the_trigger(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow(), (report(9), []), (report(3), []))
    batches_before: list[int] = []
    wait = driver.stop.wait

    def noted(seconds: float) -> bool:
        if seconds > HOUR / 2:
            batches_before.append(len(driver.jobs))
            driver.stop.set()
        return wait(min(seconds, 0.01))

    monkeypatch.setattr(driver.stop, "wait", noted)
    driver.stream(until_caught_up=False, trigger_seconds=HOUR, most=10)
    assert batches_before == [2]


def epochs(driver: Driver) -> list[int | None]:
    """The leader epochs in the manifest, by partition."""
    assert driver.run.manifest is not None
    return [one.leader_epoch for _, one in sorted(driver.run.manifest.positions["legs"].items())]


def test_a_new_leader_is_noted_between_two_batches_and_one_that_lost_records_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, flow(), (report(12), ()))
    driver.broker.epoch = 3
    driver.engine.look()
    assert epochs(driver) == [3, 3]
    driver.commit()
    driver.broker.epoch = 4
    driver.engine.look()
    assert epochs(driver) == [4, 4]
    driver.broker.epoch, driver.broker.cut = 6, {TopicPartition("legs", 1): 2}
    with pytest.raises(RunRefusedError, match=r"legs:1 is read up to 7, .* offset 2 on.* epoch 6.*accept beyond-end"):
        driver.engine.look()
    assert epochs(driver) == [4, 4]


def test_within_a_batch_a_new_leader_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt may have folded records that are lost: whether the batch is still whole is asked with the noted epoch."""
    driver = Driver(monkeypatch, flow(), (report(), [TasksLostError("gone")]), (report(12), ()))
    driver.broker.epoch = 3
    driver.engine.look()
    driver.broker.epoch = 4
    driver.commit()
    assert epochs(driver) == [3, 3]
    place = TopicPartition("legs", 0)
    assert [job.progress.leader_epochs.get(place) for job in driver.jobs] == [3, 3]


def test_records_that_a_crashed_run_may_have_folded_and_a_new_leader_lost_are_followed_by_a_branch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The crashed run had read all, this one has committed less when the leader changes."""
    driver = Driver(monkeypatch, flow(), (report(12), ()))
    driver.run.crashed = True
    driver.run.doubted(ENDS)
    driver.broker.epoch = 3
    driver.engine.look()
    driver.broker.epoch, driver.broker.cut = 4, {TopicPartition("legs", 0): 2}
    [first, second] = driver.engine.plan(driver.engine.look(), 0)
    assert (first.end, second.end) == (2, 7)
    assert driver.run.manifest is not None
    assert driver.run.manifest.positions["legs"][0].branches == ((2, 4),)
    driver.commit()
    driver.broker.epoch, driver.broker.cut = 5, {}
    driver.engine.look()
    assert driver.run.manifest.positions["legs"][0].branches == ((2, 4),)


def test_a_topic_that_was_created_again_is_named_as_that_although_its_leader_epochs_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, flow(), (report(12), ()))
    driver.broker.epoch = 3
    driver.engine.look()
    driver.commit()
    driver.broker.epoch, driver.broker.topic_id, driver.broker.cut = 0, "T2", {TopicPartition("legs", 0): -1}
    with pytest.raises(RunRefusedError, match="topic-recreated"):
        driver.engine.look()

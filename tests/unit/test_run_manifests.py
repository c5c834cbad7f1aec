"""The manifests that a run writes: at its start, after a batch, and between two."""

import msgspec
import pytest

from aggregations.per_message.ledger import Entry
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from envelope import TopicPartition
from persistence.commit import faults
from persistence.manifest import Growth, Manifest, Progress
from tests.support.pure import fresh_store
from tests.support.two_stages import flow, manifest, save, stored, two_stores


def test_the_next_manifest_never_goes_back_and_keeps_the_other_partitions():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5, TopicPartition("legs", 1): 3}, {"legs": "T1"}, {}))
    after = run.following({TopicPartition("legs", 0): 2}, {"legs": "T1"}, {})
    assert {p: progress.next_offset for p, progress in after.positions["legs"].items()} == {0: 5, 1: 3}
    assert (after.batch, after.epoch) == (2, run.epoch)


def test_a_partition_of_which_nothing_was_read_stands_at_its_beginning_in_the_next_manifest():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    assert run.following({TopicPartition("legs", 0): 0}, {}, {}).positions == {"legs": {0: Progress(0)}}


@pytest.mark.parametrize("ids", [{}, {"legs": ""}])
def test_the_next_manifest_keeps_the_partitions_of_a_topic_without_an_id(ids):
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5}, {}, {}))
    assert run.following({TopicPartition("legs", 1): 3}, ids, {}).positions == {
        "legs": {0: Progress(5), 1: Progress(3)}
    }


def test_the_next_manifest_keeps_what_is_known_of_topics_that_the_batch_has_nothing_of():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5}, {"legs": "T1"}, {}))
    after = run.following({TopicPartition("more", 0): 3}, {"more": "M"}, {})
    assert after.positions == {"legs": {0: Progress(5)}, "more": {0: Progress(3)}}
    assert after.topic_ids == {"legs": "T1", "more": "M"}


def test_a_topic_created_again_starts_anew_in_the_next_manifest():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5, TopicPartition("legs", 1): 3}, {"legs": "T1"}, {}))
    after = run.following({TopicPartition("legs", 0): 2}, {"legs": "T2"}, {})
    assert {p: progress.next_offset for p, progress in after.positions["legs"].items()} == {0: 2}
    assert after.topic_ids == {"legs": "T2"}


def test_the_ids_of_a_consumed_topic_are_kept_in_order_of_age_though_it_is_nobodys_root():
    run = begin(flow(), bind(flow(), {}, fresh_store()))
    run.advanced(run.following({TopicPartition("legs", 0): 5}, {"legs": "T1"}, {"raw": ("R",)}))
    after = run.following({TopicPartition("legs", 0): 2}, {"legs": "T2"}, run.incarnations({}).merged())
    assert after.incarnations == {"raw": ("R",), "legs": ("T1", "T2")}


def test_the_start_of_a_first_run_is_written_into_every_store():
    run = begin(flow(), two_stores())
    run.start_at("legs", "T1", {0: 0, 1: 5})
    positions = {"legs": {0: Progress(0), 1: Progress(5)}}
    assert stored(run) == [Manifest(run.epoch, 0, positions, {"legs": "T1"}, {"legs": ("T1",)}, seen={})] * 2
    assert run.manifest.positions == positions
    assert run.batch == 1


def test_the_start_of_a_later_run_is_written_where_it_differs_and_keeps_what_is_known_of_other_topics():
    stores = two_stores()
    ref = begin(flow(), stores).ref
    known = Manifest(
        1,
        4,
        {"legs": {0: Progress(7)}, "old": {3: Progress(8)}},
        {"legs": "T1", "old": "O"},
        {"legs": ("T0", "T1"), "old": ("O",)},
    )
    save(stores["b"], ref, known)
    save(stores["a"], ref, known)
    run = begin(flow(), stores)
    run.start_at("legs", "T1", {0: 7})
    assert stored(run) == [msgspec.structs.replace(known, epoch=run.epoch)] * 2
    run.start_at("legs", "T1", {0: 7, 1: 0})
    positions = {"legs": {0: Progress(7), 1: Progress(0)}, "old": {3: Progress(8)}}
    after = Manifest(run.epoch, 4, positions, known.topic_ids, known.incarnations)
    assert stored(run) == [after] * 2
    assert run.manifest.positions == positions


def test_a_topic_without_an_id_leaves_no_id_behind():
    run = begin(flow(), two_stores())
    run.start_at("legs", "", {0: 2})
    assert stored(run) == [Manifest(run.epoch, 0, {"legs": {0: Progress(2)}}, seen={})] * 2


def test_the_growth_that_is_found_at_a_start_is_written_into_every_store_though_every_offset_is_known():
    """A run that dies before its first manifest passes the growth on: otherwise histories would evict positions."""
    stores = two_stores()
    starts, growth = {0: 5, 1: 0}, Growth(1, 2, 7)
    begin(flow(), stores).start_at("legs", "T1", starts)
    begin(flow(), stores).start_at("legs", "T1", starts, growth)
    run = begin(flow(), stores)
    assert run.growths == {"legs": growth}
    assert [one.growth for one in stored(run)] == [{"legs": growth}] * 2
    run.start_at("legs", "T1", starts)
    assert begin(flow(), stores).growths == {}
    assert [one.growth for one in stored(run)] == [{}] * 2


def test_a_start_that_says_nothing_new_writes_nothing():
    run = begin(flow(), two_stores())
    run.start_at("legs", "T1", {0: 5}, Growth(1, 2, 7))
    watch = faults.Injector([])
    with faults.use(watch):
        run.start_at("legs", "T1", {0: 5}, Growth(1, 2, 7))
    assert watch.reached == {}


def test_a_growth_is_written_once_before_its_batch_and_its_end_goes_with_the_batch_that_reaches_it():
    """Written before, the end would let the next run evict what a replay of that batch still needs."""
    run = begin(flow(), two_stores())
    run.start_at("legs", "T1", {0: 5})
    run.growths["legs"] = Growth(1, 2, 7)
    watch = faults.Injector([])
    with faults.use(watch):
        run.note_growth()
        run.note_growth()
        run.growths.clear()
        run.note_growth()
    assert watch.reached == {"ledger": 2}
    assert [one.growth for one in stored(run)] == [{"legs": Growth(1, 2, 7)}] * 2
    assert run.following({TopicPartition("legs", 0): 6}, {"legs": "T1"}, {}).growth == {}


def created_again():
    """A run on two stores that begins to read a topic that was created again, and the stores."""
    stores = two_stores()
    ref = begin(flow(), stores).ref
    save(stores["b"], ref, manifest(50))
    save(stores["a"], ref, manifest(50))
    run = begin(flow(), stores)
    run.start_at("legs", "T2", {0: 0}, Growth(1, 2, 7))
    return run, stores


def test_a_topic_that_was_created_again_is_started_at_and_written_down_with_its_first_batch():
    run, _ = created_again()
    assert stored(run) == [msgspec.structs.replace(manifest(50), epoch=run.epoch)] * 2
    assert run.start == {("legs", 0): 0}
    assert run.manifest.topic_ids == {"legs": "T1"}


@pytest.mark.parametrize(
    "write", [lambda run: run.list_dead({Entry("a", "!legs:0#T2", (0,))}), lambda run: run.finish()]
)
def test_a_crash_between_two_stores_before_a_batch_of_the_topic_created_again_is_folded_is_no_loss(write):
    run, stores = created_again()
    upstream = stored(run)[0]
    write(run)
    before = (upstream.positions, {"legs": "T1"}, {})
    assert [(one.positions, one.topic_ids, one.growth) for one in stored(run)] == [before] * 2
    save(stores["a"], run.ref, upstream)  # as it was before the second write
    assert begin(flow(), stores).start == {("legs", 0): 50}

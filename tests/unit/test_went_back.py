"""Stores that go back, as a run and the start of the next one see them. Each part of these stores can go back by itself."""

import itertools
from collections import Counter
from contextlib import suppress

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.per_message.ledger import Entry
from aggregations.run.begin import begin
from aggregations.run.memory import MemoryRunner
from envelope import TopicPartition
from persistence.cas import manifest_behind
from persistence.commit.faults import Fault, FaultOutcome, Injector, use
from persistence.errors import StoreWentBack, Terminal, Transient
from persistence.marks import Mark
from persistence.protocol import FlowRef, Write
from tests.simulation.stores import FLOW_PART, open_store
from tests.support.pure import bare, leg

COUNT = Fields(n=count())
FLOW = Flow("fleet").source(bare()).aggregate("a", "tail", COUNT).aggregate("b", "carrier", COUNT)
_names = itertools.count()


class _DiedError(BaseException):
    pass


def _die():
    raise _DiedError


def url():
    return f"simulated://went-back-{next(_names)}"


def legs(first, last):
    return [leg(offset, f"N{offset % 7}", carrier=f"C{offset % 5}") for offset in range(first, last)]


@pytest.fixture
def one():
    """A flow in one store."""
    home = url()
    return open_store(home), {"a": home, "b": home}


@pytest.fixture
def two():
    """A flow in two stores: upstream, downstream, URL by stage."""
    up, down = url(), url()
    return open_store(up), open_store(down), {"a": up, "b": down}


def gone_back(store, urls, *parts, accept=()):
    """A run that has folded sixty legs, and whose store then went back to thirty: in these parts, or as a whole."""
    runner = MemoryRunner(FLOW, urls, accept=accept)
    runner.process(legs(0, 30))
    copy = store.copy()
    runner.process(legs(30, 60))
    store.restore(copy, *[parts] if parts else [])
    return runner


def sums(runner):
    return {stage: sum(state["n"] for state in runner.results(stage).values()) for stage in ("a", "b")}


@pytest.mark.parametrize("part", ["0", "1", "2"])
def test_a_part_that_goes_back_under_a_run_ends_it_and_the_next_start_is_refused(one, part):
    store, urls = one
    runner = gone_back(store, urls, part)
    with pytest.raises(StoreWentBack, match=f"bucket {part} went back"):
        runner.process(legs(60, 90))
    with pytest.raises(RunRefusedError, match=rf"flow fleet: .*bucket {part}: save.*--accept store-went-back"):
        MemoryRunner(FLOW, urls)


def test_a_part_that_goes_back_between_two_runs_is_refused_at_the_start(one):
    store, urls = one
    gone_back(store, urls, "1")
    with pytest.raises(RunRefusedError, match="a replay would not restore them"):
        begin(FLOW, urls)


def test_a_store_that_goes_back_as_a_whole_under_a_run_ends_it_and_the_next_one_folds_again(one):
    store, urls = one
    runner = gone_back(store, urls)
    with pytest.raises(StoreWentBack, match=r"^flow fleet, generation 1: the manifest went back"):
        runner.process(legs(60, 90))
    again = MemoryRunner(FLOW, urls)
    assert again.run.start == {("legs", 0): 30}
    again.process(legs(30, 90))
    assert sums(again) == {"a": 90, "b": 90}


def test_a_manifest_that_goes_back_after_the_check_of_its_batch_is_noticed_when_the_next_one_is_written(one):
    store, urls = one
    runner = gone_back(store, urls, FLOW_PART)
    with pytest.raises(StoreWentBack, match="manifest went back"):
        runner.run.save_manifest("a", runner.run.changed())


def test_a_manifest_that_went_back_is_named_by_what_was_acknowledged_and_what_is_there():
    assert str(manifest_behind(FlowRef("fleet", 2), (3, 14), (1, 5))).startswith(
        "flow fleet, generation 2: the manifest went back: epoch 3, batch 14 was acknowledged; the store has epoch 1, batch 5."
    )


def test_a_batch_that_touches_none_of_the_parts_that_lost_something_gets_no_manifest(one):
    store, urls = one
    flow = Flow("fleet").source(bare()).aggregate("a", "tail", COUNT)
    runner = MemoryRunner(flow, {"a": urls["a"]})
    copy = store.copy()
    records = {part: [one for one in legs(0, 30) if store._bucket_of(one.key) == part] for part in ("0", "1")}
    runner.process(records["0"])
    store.restore(copy, ["0", "1", "2"])
    store._manifests.clear()
    with pytest.raises(StoreWentBack, match="manifest went back"):
        runner.process(records["1"])
    assert MemoryRunner(flow, {"a": urls["a"]}).run.start == {}


def test_a_loss_before_the_manifest_is_proven_by_what_the_stage_upstream_kept(two):
    up, down, urls = two
    runner = MemoryRunner(FLOW, urls)
    runner.process(legs(0, 30))
    copy = down.copy()
    with use(Injector([Fault("manifest:b", FaultOutcome.BEFORE)], _die)), suppress(_DiedError):
        runner.process(legs(30, 60))
    down.restore(copy)
    assert down.load_manifest(runner.run.ref).positions == up.load_manifest(runner.run.ref).positions
    with pytest.raises(RunRefusedError, match="stage b, bucket"):
        MemoryRunner(FLOW, urls)


def test_a_loss_before_anything_upstream_was_written_is_folded_again(two):
    _, down, urls = two
    runner = MemoryRunner(FLOW, urls)
    runner.process(legs(0, 30))
    copy = down.copy()
    with use(Injector([Fault("persist:a", FaultOutcome.BEFORE)], _die)), suppress(_DiedError):
        runner.process(legs(30, 60))
    down.restore(copy)
    again = MemoryRunner(FLOW, urls)
    again.process(legs(30, 60))
    assert sums(again) == {"a": 60, "b": 60}


@pytest.mark.parametrize("point", ["persist:b", "persist:a", "write:a", "write:b", "manifest:a", "manifest:b", "epoch"])
@pytest.mark.parametrize(
    "outcome", [FaultOutcome.BEFORE, FaultOutcome.AFTER, FaultOutcome.ERROR, FaultOutcome.UNANSWERED]
)
def test_a_crash_alone_is_never_taken_for_a_loss(two, point, outcome):
    _, _, urls = two
    MemoryRunner(FLOW, urls).process(legs(0, 30))
    for first in (30, 40, 50):
        runner = MemoryRunner(FLOW, urls)
        with use(Injector([Fault(point, outcome, 1)], _die)), suppress(_DiedError, Exception):
            runner.process(legs(first, first + 10))
        MemoryRunner(FLOW, urls).process(legs(first, first + 10))
    assert sums(MemoryRunner(FLOW, urls)) == {"a": 60, "b": 60}


def test_an_upstream_store_of_an_earlier_moment_is_no_loss(two):
    up, _, urls = two
    gone_back(up, urls)
    again = MemoryRunner(FLOW, urls)
    assert again.run.start == {("legs", 0): 30}
    again.process(legs(30, 60))
    assert sums(again) == {"a": 60, "b": 60}


def test_what_is_behind_by_its_manifest_is_refused_once_and_by_that_name(two):
    _, down, urls = two
    gone_back(down, urls)
    with pytest.raises(RunRefusedError, match="--accept downstream-behind") as refused:
        MemoryRunner(FLOW, urls)
    assert "store-went-back" not in str(refused.value)
    accepted = MemoryRunner(FLOW, urls, accept=["downstream-behind"])
    accepted.process(legs(60, 90))
    MemoryRunner(FLOW, urls).process(legs(90, 95))


def test_a_loss_that_was_accepted_is_not_looked_for_again_and_a_new_one_is(one):
    store, urls = one
    gone_back(store, urls, "1")
    MemoryRunner(FLOW, urls, accept=["store-went-back"]).process(legs(60, 61))
    runner = MemoryRunner(FLOW, urls)
    copy = store.copy()
    runner.process(legs(61, 90))
    store.restore(copy, ["1"])
    with pytest.raises(RunRefusedError, match="store-went-back"):
        MemoryRunner(FLOW, urls)


def test_a_loss_is_accepted_once_also_where_that_run_dies_before_its_first_manifest(one):
    store, urls = one
    gone_back(store, urls, "0")
    runner = MemoryRunner(FLOW, urls, accept=["store-went-back"])
    with use(Injector([Fault("manifest", FaultOutcome.ERROR)])), pytest.raises(Transient):
        runner.process(legs(60, 90))
    MemoryRunner(FLOW, urls).process(legs(60, 90))


def test_a_risk_that_is_accepted_without_need_forgets_nothing(one):
    store, urls = one
    gone_back(store, urls, "2", accept=["store-went-back", "downstream-behind"])
    with pytest.raises(RunRefusedError):
        MemoryRunner(FLOW, urls)


def test_a_fence_that_went_back_stops_the_run(one):
    store, urls = one
    copy = store.copy()
    runner = MemoryRunner(FLOW, urls)
    store.restore(copy, [FLOW_PART])
    with pytest.raises(Terminal, match="the manifest went back"):
        runner.process(legs(0, 3))


def test_tasks_whose_reports_are_lost_are_asked_of_the_stores(one):
    store, urls = one
    runner = MemoryRunner(FLOW, urls)
    runner.process(legs(0, 30))
    run = runner.run
    known = dict(run.known.of("a"))
    run.check_marks()
    assert run.known.of("a") == known
    copy = store.copy()
    runner.process(legs(30, 60))
    store.restore(copy, ["0"])
    with pytest.raises(StoreWentBack):
        run.check_marks()


def test_a_loss_that_a_failed_attempt_left_behind_is_seen_by_what_it_kept_upstream(one):
    store, urls = one
    run = begin(FLOW, urls)
    a, b = run.ref.stage("a"), run.ref.stage("b")
    copy = store.copy()
    lost = store.save(b, [Write(b"C0", 0, b"{}")], epoch=run.epoch, batch=1)
    told = {"b": {bucket: mark.short for bucket, mark in lost.items()}}
    [part] = lost
    upstream = next(key for key in (b"%d" % i for i in range(99)) if store._bucket_of(key) != part)
    store.save(a, [Write(upstream, 0, b"{}")], epoch=run.epoch, batch=1, downstream=told)
    store.restore(copy, [part])
    covering = next(key for key in (b"x%d" % i for i in range(99)) if store._bucket_of(key) == part)
    assert store.save(b, [Write(covering, 0, b"{}")], epoch=run.epoch, batch=1)[part].count == lost[part].count
    with pytest.raises(StoreWentBack, match=f"stage b: bucket {part}"):
        run.check_marks()


def test_manifests_hold_the_marks_of_their_store_and_of_those_downstream(two):
    up, down, urls = two
    runner = MemoryRunner(FLOW, urls)
    runner.process(legs(0, 30))
    manifests = [store.load_manifest(runner.run.ref) for store in (up, down)]
    assert [set(one.marks) for one in manifests] == [{"a", "b"}, {"b"}]
    for stage, store in (("a", up), ("b", down)):
        held = {bucket: one.mark for bucket, one in store.marks(runner.run.ref.stage(stage)).items()}
        assert {bucket: Mark.parse(text).count for bucket, text in manifests[0].marks[stage].items()} == {
            bucket: mark.count for bucket, mark in held.items() if mark.count
        }
    kept = [one for one in up.marks(runner.run.ref.stage("a")).values() if one.mark.count]
    assert kept
    assert all(one.downstream == {"b": manifests[0].marks["b"]} for one in kept)
    assert Counter(one.epoch for one in kept) == {runner.run.epoch: len(kept)}


def test_a_loss_that_was_accepted_is_not_found_again_in_what_buckets_upstream_kept_of_it(one):
    """The missing writes were acknowledged to an earlier run; the active run was started without them on purpose."""
    store, urls = one
    gone_back(store, urls, "0")
    accepted = MemoryRunner(FLOW, urls, accept=["store-went-back"])
    accepted.run.check_marks()
    accepted.process(legs(60, 90))


@pytest.mark.parametrize("write", [lambda run: run.finish(), lambda run: run.list_dead({Entry("a", "g", (0,))})])
def test_between_two_batches_a_manifest_does_not_count_on_what_a_batch_saved_that_has_none(two, write):
    """That may go back with its store, and the replay saves it again."""
    _, down, urls = two
    run = begin(FLOW, urls)
    run.advanced(run.following({TopicPartition("legs", 0): 1}, {"legs": "T1"}, {}))
    run.known.note("b", down.save(run.ref.stage("b"), [Write(b"k", 0, b"{}")], epoch=run.epoch, batch=2))
    write(run)
    assert down.load_manifest(run.ref).marks == {}
    run.save_manifest("b", run.manifest)
    assert down.load_manifest(run.ref).marks.keys() == {"b"}

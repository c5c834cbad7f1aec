"""Contract 23 to 26: marks, which detect a store that went back."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from persistence.contract.base import Contract, creating
from persistence.errors import Conflict, StoreWentBack
from persistence.marks import Bucket, Mark, Marks
from persistence.protocol import FlowRef, Manifest, Progress, StageRef, StateStore, Stored, Write


class MarkContract(Contract):
    """Every save that changes a state raises a mark; a save that finds too low a mark changes nothing."""

    @pytest.fixture(autouse=True)
    def marked(self, store: StateStore) -> None:
        """Skip stores that keep no marks."""
        if not store.capabilities.marked:
            pytest.skip("this store keeps no marks")

    def test_a_save_raises_the_marks_of_the_buckets_that_it_came_to_and_of_no_other(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 23, 25
        keys = [b"%d" % i for i in range(50)]
        first = store.save(stage, creating(keys), epoch=epoch, batch=1)
        assert first
        assert _marks(other, stage) == _marks(store, stage)
        assert {bucket: mark for bucket, mark in _marks(store, stage).items() if mark.count} == first
        before = _marks(store, stage)
        second = store.save(stage, [Write(b"0", 1, b"x")], epoch=epoch, batch=2)
        assert len(second) == 1
        for bucket, mark in second.items():
            assert mark.count > before[bucket].count
            assert mark.holds(before[bucket])
            assert not before[bucket].holds(mark)
        assert _marks(store, stage) == {**before, **second}

    def test_a_save_that_changes_nothing_leaves_the_mark(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 10, 23
        writes = creating([b"a", b"b"], b"1")
        first = store.save(stage, writes, epoch=epoch, batch=1)
        assert store.save(stage, writes, epoch=epoch, batch=1) == first
        with pytest.raises(Conflict):
            store.save(stage, creating([b"a"], b"2"), epoch=epoch, batch=2)
        assert store.save(stage, [], epoch=epoch, batch=3) == {}
        assert {bucket: mark for bucket, mark in _marks(store, stage).items() if mark.count} == first

    def test_marks_of_stages_generations_and_flows_are_apart(
        self, store: StateStore, flow: FlowRef, epoch: int
    ) -> None:  # 15, 23
        rebuilt = FlowRef(flow.flow, 2)
        store.install_epoch(rebuilt, epoch)
        marks = store.save(flow.stage("a"), creating([b"k"]), epoch=epoch, batch=1)
        for stage in (flow.stage("b"), flow.stage("a.b"), rebuilt.stage("a")):
            assert not any(mark.count for mark in _marks(store, stage).values())
        assert {bucket: mark for bucket, mark in _marks(store, flow.stage("a")).items() if mark.count} == marks

    def test_every_save_of_many_writers_has_a_mark_of_its_own(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 23
        if not store.capabilities.counted:
            pytest.skip("saves of one batch share a mark here")

        def saved(number: int) -> list[int]:
            handle = other if number % 2 else store
            counts = []
            for version in range(5):
                marks = handle.save(stage, [Write(b"%d" % number, version, b"x")], epoch=epoch, batch=version)
                counts += [(bucket, mark.count) for bucket, mark in marks.items()]
            return counts  # type: ignore[return-value]

        with ThreadPoolExecutor(4) as pool:
            counts = [one for part in pool.map(saved, range(8)) for one in part]
        assert len(set(counts)) == len(counts) == 40

    def test_a_save_that_knows_of_more_than_the_bucket_has_changes_nothing(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 24
        marks = store.save(stage, creating([b"k"], b"1"), epoch=epoch, batch=1)
        ahead = _ahead(marks)
        with pytest.raises(StoreWentBack, match=stage.stage):
            store.save(stage, [Write(b"k", 1, b"2")], epoch=epoch, batch=2, known=ahead)
        assert store.load(stage, [b"k"]) == {b"k": Stored(1, epoch, 1, b"1")}
        held = _marks(store, stage)
        assert {bucket: held[bucket] for bucket in marks} == marks

    def test_an_untouched_bucket_that_should_have_something_is_refused(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 24
        store.save(stage, creating([b"k"], b"1"), epoch=epoch, batch=1)
        fresh = stage.flow_ref.stage("fresh")
        store.save(fresh, creating([b"a"]), epoch=epoch, batch=1)
        lost = {bucket: Mark(epoch << 40, (("gone", 0),)) for bucket in _marks(store, fresh)}
        with pytest.raises(StoreWentBack):
            store.save(fresh, creating([b"k"]), epoch=epoch, batch=1, known=lost)
        assert b"k" not in store.load(fresh, [b"k"])

    def test_a_bucket_that_is_ahead_of_what_is_known_is_no_error(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 24
        known: Marks = {}
        for version in range(4):
            marks = store.save(stage, [Write(b"k", version, b"x")], epoch=epoch, batch=version + 1, known=known)
            if version == 1:
                known = marks
        newer = store.acquire_epoch(stage.flow_ref)
        store.save(stage, [Write(b"k", 4, b"y")], epoch=newer, batch=0, known=known)

    def test_what_a_save_says_of_stages_downstream_is_kept_with_its_bucket(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 25
        told = {"carrier": {"0": "17 a1b2", "63": "4"}, "fleet": {"x/1": "1"}}
        marks = store.save(stage, creating([b"k"]), epoch=epoch, batch=1, downstream=told)
        (bucket,) = marks
        assert other.marks(stage)[bucket] == Bucket(marks[bucket], epoch, told)
        store.save(stage, creating([b"k"]), epoch=epoch, batch=1, downstream={"carrier": {"0": "1"}})
        assert other.marks(stage)[bucket].downstream == told
        later = {"carrier": {"0": "18 a1b2"}}
        store.save(stage, [Write(b"k", 1, b"x")], epoch=epoch, batch=2, downstream=later)
        assert other.marks(stage)[bucket].downstream == later

    def test_a_manifest_older_than_the_one_that_is_known_to_be_there_is_noticed(
        self, store: StateStore, flow: FlowRef, epoch: int
    ) -> None:  # 26
        with pytest.raises(StoreWentBack, match="manifest went back"):
            store.save_manifest(flow, Manifest(epoch=epoch, batch=3), after=(epoch, 2))
        assert store.load_manifest(flow) is None
        kept = Manifest(epoch=epoch, batch=2, positions={"t": {0: Progress(5)}})
        store.save_manifest(flow, kept)
        with pytest.raises(StoreWentBack):
            store.save_manifest(flow, Manifest(epoch=epoch, batch=4), after=(epoch, 3))
        assert store.load_manifest(flow) == kept
        for batch in (3, 3):
            store.save_manifest(flow, Manifest(epoch=epoch, batch=batch), after=(epoch, 2))
        newer = store.acquire_epoch(flow)
        store.save_manifest(flow, Manifest(epoch=newer, batch=0), after=(epoch, 3))


def _marks(store: StateStore, stage: StageRef) -> dict[str, Mark]:
    return {bucket: one.mark for bucket, one in store.marks(stage).items()}


def _ahead(marks: Marks) -> dict[str, Mark]:
    return {bucket: Mark(mark.count + 1, mark.lives) for bucket, mark in marks.items()}

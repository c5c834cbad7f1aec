"""Contract 28 to 32: states leave a store by their due time, and none returns; those that are due are found."""

import pytest

from persistence.contract.base import Contract, creating
from persistence.errors import Conflict, Fenced, StoreWentBack, Terminal
from persistence.marks import Mark
from persistence.protocol import FlowRef, StageRef, StateStore, Write

_MANY = 3_000
_LONG = b"k" * 600


def _due(times: dict[bytes, int | None], value: bytes = b"{}") -> list[Write]:
    return [Write(key, 0, value, due) for key, due in times.items()]


class RemovalContract(Contract):
    """States that are due leave, all others stay, and the bucket remembers up to which time."""

    def test_states_that_are_due_leave_and_all_others_stay(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 28
        times = {b"": 5, b"a": 6, b"b": 7, b"c": None, b"old": -5, b"late": 2**37}
        store.save(stage, _due(times), epoch=epoch, batch=1)
        assert store.remove(stage, 6, epoch=epoch, batch=1).states == 3
        left = {b"b", b"c", b"late"}
        assert other.load(stage, list(times)).keys() == left
        assert {key for key, _ in other.scan(stage)} == left

    def test_a_later_write_puts_off_the_due_time_of_its_state(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 28
        store.save(stage, _due({b"a": 5, b"b": 9, b"c": None, b"d": 5}), epoch=epoch, batch=1)
        second = [Write(b"a", 1, b"2", 8), Write(b"b", 1, b"2", 9), Write(b"c", 1, b"2", 4), Write(b"d", 1, b"2")]
        store.save(stage, second, epoch=epoch, batch=2)
        assert store.remove(stage, 7, epoch=epoch, batch=2).states == 2
        assert store.load(stage, [b"a", b"b", b"c", b"d"]).keys() == {b"a", b"b"}
        assert store.remove(stage, 8, epoch=epoch, batch=2).states == 1
        assert store.remove(stage, 9, epoch=epoch, batch=2).states == 1
        assert dict(store.scan(stage)) == {}

    def test_more_states_than_one_step_removes_leave_together(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 28
        limit = store.capabilities.max_key_bytes
        keys = [b"%05d" % i for i in range(_MANY)] + ([_LONG, _LONG + b"2"] if limit is None or limit > 700 else [])
        store.save(stage, [Write(key, 0, b"{}", 1 + i % 2) for i, key in enumerate(keys)], epoch=epoch, batch=1)
        assert store.remove(stage, 1, epoch=epoch, batch=1).states == (len(keys) + 1) // 2
        assert {key for key, _ in store.scan(stage)} == set(keys[1::2])

    def test_stages_generations_and_flows_keep_their_states(
        self, store: StateStore, flow: FlowRef, epoch: int
    ) -> None:  # 15, 28
        rebuilt = FlowRef(flow.flow, 2)
        store.install_epoch(rebuilt, epoch)
        others = [flow.stage("b"), flow.stage("a.b"), rebuilt.stage("a")]
        for stage in (flow.stage("a"), *others):
            store.save(stage, _due({b"k": 5}), epoch=epoch, batch=1)
        store.remove(flow.stage("a"), 9, epoch=epoch, batch=1)
        assert dict(store.scan(flow.stage("a"))) == {}
        for stage in others:
            assert store.load(stage, [b"k"]).keys() == {b"k"}
            assert {one.removed for one in store.marks(stage).values()} <= {None}

    def test_every_bucket_keeps_the_highest_time_up_to_which_states_were_removed(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 29
        store.save(stage, _due({b"a": 50}), epoch=epoch, batch=1)
        assert {one.removed for one in other.marks(stage).values()} == {None}
        for until, kept in ((7, 7), (9, 9), (8, 9), (-3, 9)):
            store.remove(stage, until, epoch=epoch, batch=1)
            assert {one.removed for one in other.marks(stage).values()} == {kept}
        assert store.load(stage, [b"a"]).keys() == {b"a"}

    def test_a_stage_without_states_keeps_the_time_too(self, store: StateStore, stage: StageRef, epoch: int) -> None:
        # 29: a write that is under way must not bring in a state that should have left.
        assert store.remove(stage, 7, epoch=epoch, batch=1).states == 0
        with pytest.raises(Conflict):
            store.save(stage, _due({b"a": 7}), epoch=epoch, batch=1)
        store.save(stage, _due({b"b": 8}), epoch=epoch, batch=1)
        assert {key for key, _ in store.scan(stage)} == {b"b"}

    @pytest.mark.parametrize("knows", [False, True])
    def test_a_state_that_was_removed_does_not_return(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int, *, knows: bool
    ) -> None:  # 30: whether or not the handle has read up to which time states were removed
        writes = _due({b"a": 5, b"b": 6})
        store.save(stage, writes, epoch=epoch, batch=1)
        store.load(stage, [b"a", b"b", b"c"])
        other.remove(stage, 6, epoch=epoch, batch=1)
        if knows:
            store.marks(stage)
        for again in (writes, [Write(b"a", 1, b"2", 5)], [Write(b"c", 0, b"2", 6)], [Write(b"a", 1, b"2")]):
            with pytest.raises(Conflict) as caught:
                store.save(stage, again, epoch=epoch, batch=1)
            assert set(caught.value.keys) == {write.key for write in again}
        assert dict(store.scan(stage)) == {}
        if store.capabilities.conditional:
            store.save(stage, _due({b"a": 7}), epoch=epoch, batch=2)
            assert store.load(stage, [b"a"])[b"a"].version == 1

    def test_an_older_run_removes_nothing(self, store: StateStore, stage: StageRef, epoch: int) -> None:  # 5, 31
        store.save(stage, _due({b"a": 5}), epoch=epoch, batch=1)
        newer = store.acquire_epoch(stage.flow_ref)
        with pytest.raises(Fenced):
            store.remove(stage, 9, epoch=epoch, batch=1)
        with pytest.raises(Terminal):
            store.remove(stage, 9, epoch=newer + 1, batch=1)
        with pytest.raises(ValueError, match="count from 1"):
            store.remove(stage, 9, epoch=0, batch=1)
        assert store.load(stage, [b"a"]).keys() == {b"a"}
        assert {one.removed for one in store.marks(stage).values()} == {None}

    def test_a_newer_run_removes_the_states_of_an_older_one(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 31
        store.save(stage, _due({b"a": 5}), epoch=epoch, batch=7)
        newer = store.acquire_epoch(stage.flow_ref)
        assert store.remove(stage, 9, epoch=newer, batch=0).states == 1
        assert store.load(stage, [b"a"]) == {}

    def test_removing_again_removes_nothing_further(self, store: StateStore, stage: StageRef, epoch: int) -> None:
        store.save(stage, _due({b"a": 5, b"b": 50}), epoch=epoch, batch=1)  # 31
        first = store.remove(stage, 9, epoch=epoch, batch=1)
        again = store.remove(stage, 9, epoch=epoch, batch=1)
        assert (first.states, again.states) == (1, 0)
        assert again.marks == first.marks

    def test_a_removal_raises_the_mark_of_a_bucket_that_lost_states(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 23, 31
        if not store.capabilities.counted:
            pytest.skip("saves of one batch share a mark here")
        saved = store.save(stage, _due({b"a": 5}), epoch=epoch, batch=1)
        removed = store.remove(stage, 9, epoch=epoch, batch=1).marks
        for bucket, mark in saved.items():
            assert removed[bucket].holds(mark)
            assert not mark.holds(removed[bucket])
        held = {bucket: one.mark for bucket, one in store.marks(stage).items()}
        assert removed.items() <= held.items()
        store.save(stage, creating([b"z"]), epoch=epoch, batch=2, known=removed)

    def test_a_bucket_that_went_back_removes_nothing(self, store: StateStore, stage: StageRef, epoch: int) -> None:
        if not store.capabilities.marked:  # 24, 31
            pytest.skip("the store keeps no marks")
        marks = store.save(stage, _due({b"a": 5}), epoch=epoch, batch=1)
        ahead = {bucket: Mark(mark.count + 1, mark.lives) for bucket, mark in marks.items()}
        with pytest.raises(StoreWentBack):
            store.remove(stage, 9, epoch=epoch, batch=1, known=ahead)
        assert store.load(stage, [b"a"]).keys() == {b"a"}

    def test_states_that_are_due_between_two_times_are_found_and_stay(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 32
        times = {b"": 5, b"a": 6, b"b": 7, b"c": None, b"old": -5, b"same": 6, b"late": 2**37}
        store.save(stage, _due(times), epoch=epoch, batch=1)
        assert sorted(other.due(stage, 6)) == [b"", b"a", b"old", b"same"]
        assert sorted(other.due(stage, 7, after=5)) == [b"a", b"b", b"same"]
        assert sorted(other.due(stage, 2**37, after=-5)) == [b"", b"a", b"b", b"late", b"same"]
        for until, after in ((-6, None), (6, 6), (5, 7), (2**37 - 1, 7)):
            assert list(other.due(stage, until, after=after)) == []
        assert store.load(stage, list(times)).keys() == times.keys()

    def test_a_state_is_found_by_the_latest_time_that_its_writes_named(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 28, 32
        store.save(stage, _due({b"a": 5, b"b": 9, b"c": None}), epoch=epoch, batch=1)
        second = [Write(b"a", 1, b"2", 8), Write(b"b", 1, b"2", 9), Write(b"c", 1, b"2", 4)]
        store.save(stage, second, epoch=epoch, batch=2)
        assert list(store.due(stage, 7)) == [b"c"]
        assert sorted(store.due(stage, 9, after=4)) == [b"a", b"b"]

    def test_of_many_states_each_is_found_once(self, store: StateStore, stage: StageRef, epoch: int) -> None:  # 32
        limit = store.capabilities.max_key_bytes
        long = [_LONG, _LONG + b"2", _LONG + b"3"] if limit is None or limit > 700 else []
        keys = sorted([b"%05d" % i for i in range(_MANY)] + long)
        store.save(stage, [Write(key, 0, b"{}", 3 * (i // 2_500)) for i, key in enumerate(keys)], epoch=epoch, batch=1)
        assert sorted(store.due(stage, 9)) == keys
        assert sorted(store.due(stage, 9, after=0)) == keys[2_500:]
        store.remove(stage, 0, epoch=epoch, batch=1)
        assert sorted(store.due(stage, 9)) == keys[2_500:]

    def test_of_other_stages_generations_and_flows_nothing_is_found(
        self, store: StateStore, flow: FlowRef, epoch: int
    ) -> None:  # 15, 32
        assert list(store.due(flow.stage("a"), 9)) == []
        store.save(flow.stage("a"), _due({b"k": 5}), epoch=epoch, batch=1)
        rebuilt, unknown = FlowRef(flow.flow, 2), FlowRef(f"{flow.flow}-2")
        store.install_epoch(rebuilt, epoch)
        for stage in (flow.stage("b"), flow.stage("a.b"), rebuilt.stage("a"), unknown.stage("a")):
            assert list(store.due(stage, 9)) == []

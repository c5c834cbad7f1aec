"""Contract 1 to 6: epochs, and who may still write."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from persistence.contract.base import Contract, creating, load_one
from persistence.errors import Fenced, Terminal
from persistence.protocol import FlowRef, Manifest, Progress, StageRef, StateStore, Write


class EpochContract(Contract):
    """Epochs rise, are installed immediately, and fence older runs."""

    def test_an_acquired_epoch_is_higher_than_all_before_and_installed_at_once(
        self, store: StateStore, other: StateStore, flow: FlowRef
    ) -> None:  # 1
        first = store.acquire_epoch(flow)
        assert first >= 1
        assert other.installed_epoch(flow) == first
        second = other.acquire_epoch(flow)
        assert second > first
        assert store.installed_epoch(flow) == second
        assert store.acquire_epoch(flow) > second

    def test_an_acquired_epoch_is_above_what_other_stores_know(self, store: StateStore, flow: FlowRef) -> None:  # 1
        assert store.acquire_epoch(flow, above=40) > 40
        assert store.acquire_epoch(flow, above=3) > 41

    def test_epochs_acquired_at_once_are_all_different(self, store_url: str, flow: FlowRef) -> None:  # 1
        handles = [self.opener(store_url) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            epochs = list(pool.map(lambda i: handles[i % 4].acquire_epoch(flow), range(32)))
        for handle in handles:
            handle.close()
        assert len(set(epochs)) == 32

    def test_installing_the_same_epoch_again_changes_nothing(self, store: StateStore, flow: FlowRef) -> None:  # 2
        store.install_epoch(flow, 5)
        store.install_epoch(flow, 5)
        assert store.installed_epoch(flow) == 5

    def test_installing_a_higher_epoch_takes_over(
        self, store: StateStore, other: StateStore, flow: FlowRef
    ) -> None:  # 2
        store.install_epoch(flow, 5)
        store.install_epoch(flow, 9)
        assert other.installed_epoch(flow) == 9

    def test_installing_a_lower_epoch_is_fenced(self, store: StateStore, flow: FlowRef) -> None:  # 2
        store.install_epoch(flow, 5)
        with pytest.raises(Fenced, match=rf"{flow.flow}.*epoch 4.*epoch 5"):
            store.install_epoch(flow, 4)
        assert store.installed_epoch(flow) == 5

    def test_a_flow_without_a_run_has_epoch_zero(self, store: StateStore, flow: FlowRef) -> None:  # 3
        assert store.installed_epoch(flow) == 0

    def test_a_number_below_one_is_no_epoch(self, store: StateStore, stage: StageRef) -> None:  # 3
        with pytest.raises(ValueError, match=f"{stage.flow}.*count from 1"):
            store.install_epoch(stage.flow_ref, 0)
        with pytest.raises(ValueError, match="count from 1"):
            store.save(stage, creating([b"k"]), epoch=0, batch=0)
        with pytest.raises(ValueError, match="count from 1"):
            store.save_manifest(stage.flow_ref, Manifest(epoch=0, batch=0))

    def test_epochs_of_flows_and_generations_are_independent(self, store: StateStore, flow: FlowRef) -> None:  # 4
        rebuilt = FlowRef(flow.flow, 2)
        epoch = store.acquire_epoch(flow)
        assert store.installed_epoch(rebuilt) == 0
        store.install_epoch(rebuilt, epoch + 7)
        assert store.installed_epoch(flow) == epoch
        store.save(flow.stage("s"), creating([b"k"]), epoch=epoch, batch=0)

    def test_an_older_run_cannot_write_states(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 5
        store.save(stage, creating([b"k"], b"old"), epoch=epoch, batch=1)
        other.acquire_epoch(stage.flow_ref)
        with pytest.raises(Fenced, match="aircraft"):
            store.save(stage, [Write(b"k", 1, b"zombie"), Write(b"new", 0, b"zombie")], epoch=epoch, batch=2)
        held = store.load(stage, [b"k", b"new"])
        assert held.keys() == {b"k"}
        assert held[b"k"].value == b"old"

    def test_an_older_run_cannot_even_repeat_its_last_write(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:
        # 5 takes precedence over 10: the older run must receive `Fenced`.
        store.save(stage, creating([b"k"]), epoch=epoch, batch=1)
        store.acquire_epoch(stage.flow_ref)
        with pytest.raises(Fenced):
            store.save(stage, creating([b"k"]), epoch=epoch, batch=1)

    def test_an_older_run_cannot_write_the_manifest(
        self, store: StateStore, flow: FlowRef, epoch: int
    ) -> None:  # 5, 18
        newer = store.acquire_epoch(flow)
        kept = Manifest(epoch=newer, batch=0, positions={"t": {0: Progress(9)}})
        store.save_manifest(flow, kept)
        with pytest.raises(Fenced):
            store.save_manifest(flow, Manifest(epoch=epoch, batch=7))
        assert store.load_manifest(flow) == kept

    def test_a_newer_run_continues_the_states_of_the_older(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:
        store.save(stage, creating([b"k"], b"1"), epoch=epoch, batch=1)
        newer = store.acquire_epoch(stage.flow_ref)
        store.save(stage, [Write(b"k", 1, b"2")], epoch=newer, batch=0)
        state = load_one(store, stage, b"k")
        assert state is not None
        assert (state.version, state.epoch, state.batch, state.value) == (2, newer, 0, b"2")

    def test_an_epoch_that_the_store_does_not_know_is_refused(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:
        # 6: this is what a store that was emptied or restored under a running flow looks like.
        with pytest.raises(Terminal, match="emptied or replaced"):
            store.save(stage, creating([b"k"]), epoch=epoch + 1, batch=0)
        with pytest.raises(Terminal):
            store.save_manifest(stage.flow_ref, Manifest(epoch=epoch + 1, batch=0))
        with pytest.raises(Terminal):
            store.save(StageRef(stage.flow, 2, "s"), creating([b"k"]), epoch=epoch, batch=0)
        with pytest.raises(Terminal):
            store.save_manifest(FlowRef(stage.flow, 2), Manifest(epoch=epoch, batch=0))
        assert store.load(stage, [b"k"]) == {}
        assert store.load_manifest(stage.flow_ref) is None

    def test_nothing_is_written_by_the_older_run_once_an_epoch_is_acquired(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 5, while a writer runs
        if not store.capabilities.fenced:
            pytest.skip("the store documents a gap in its fencing")
        keys = [b"%d" % i for i in range(50)]
        begun, ended = threading.Event(), []

        def write() -> None:
            for version in range(100_000):
                try:
                    store.save(
                        stage, [Write(key, version, b"%d" % version) for key in keys], epoch=epoch, batch=version
                    )
                except Fenced as error:
                    ended.append(error)
                    return
                if version == 3:
                    begun.set()

        writer = threading.Thread(target=write)
        writer.start()
        assert begun.wait(60)
        other.acquire_epoch(stage.flow_ref)
        seen = other.load(stage, keys)
        writer.join(60)
        assert ended
        assert other.load(stage, keys) == seen

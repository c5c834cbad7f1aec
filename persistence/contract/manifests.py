"""Contract 17 and 18: the manifest, the source of truth for progress."""

import pytest

from persistence.contract.base import Contract
from persistence.errors import Fenced
from persistence.protocol import FlowRef, Manifest, Progress, StateStore


class ManifestContract(Contract):
    """A saved manifest is loaded unchanged, and the batch never goes back within an epoch."""

    def test_a_flow_that_never_ran_has_no_manifest(self, store: StateStore, flow: FlowRef, epoch: int) -> None:  # 17
        assert store.load_manifest(flow) is None
        assert store.load_manifest(FlowRef(flow.flow, 9)) is None

    def test_a_manifest_comes_back_equal_from_any_handle(
        self, store: StateStore, other: StateStore, flow: FlowRef, epoch: int
    ) -> None:  # 17
        given = Manifest(
            epoch=epoch,
            batch=3,
            positions={"flights.legs": {0: Progress(0), 31: Progress(2**62)}, "empty": {}},
            topic_ids={"flights.legs": "qd5k_u9TRnm+/=="},
            incarnations={"flights.raw": ("one", "two"), "flights.legs": ("qd5k_u9TRnm+/==",)},
            definitions={"aircraft": "5f2b"},
        )
        store.save_manifest(flow, given)
        assert store.load_manifest(flow) == given
        assert other.load_manifest(flow) == given

    def test_a_manifest_of_many_partitions_comes_back(self, store: StateStore, flow: FlowRef, epoch: int) -> None:  # 17
        positions = {f"topic-{t}": {p: Progress(t * p) for p in range(200)} for t in range(10)}
        store.save_manifest(flow, Manifest(epoch=epoch, batch=0, positions=positions))
        assert store.load_manifest(flow) == Manifest(epoch=epoch, batch=0, positions=positions)

    def test_manifests_of_generations_are_independent(self, store: StateStore, flow: FlowRef, epoch: int) -> None:  # 15
        rebuilt = FlowRef(flow.flow, 2)
        store.save_manifest(flow, Manifest(epoch=epoch, batch=0))
        assert store.load_manifest(rebuilt) is None
        store.install_epoch(rebuilt, 1)
        store.save_manifest(rebuilt, Manifest(epoch=1, batch=5))
        assert store.load_manifest(flow) == Manifest(epoch=epoch, batch=0)

    def test_a_later_batch_replaces_and_the_same_again_succeeds(
        self, store: StateStore, flow: FlowRef, epoch: int
    ) -> None:  # 18
        for batch in (0, 1, 1, 5):
            given = Manifest(epoch=epoch, batch=batch, positions={"t": {0: Progress(batch)}})
            store.save_manifest(flow, given)
            assert store.load_manifest(flow) == given

    def test_within_an_epoch_the_batch_never_goes_back(
        self, store: StateStore, flow: FlowRef, epoch: int
    ) -> None:  # 18
        kept = Manifest(epoch=epoch, batch=5)
        store.save_manifest(flow, kept)
        with pytest.raises(Fenced, match=flow.flow):
            store.save_manifest(flow, Manifest(epoch=epoch, batch=4))
        assert store.load_manifest(flow) == kept

    def test_a_new_run_counts_its_batches_from_the_start(
        self, store: StateStore, flow: FlowRef, epoch: int
    ) -> None:  # 18
        store.save_manifest(flow, Manifest(epoch=epoch, batch=5))
        fresh = Manifest(epoch=store.acquire_epoch(flow), batch=0)
        store.save_manifest(flow, fresh)
        assert store.load_manifest(flow) == fresh

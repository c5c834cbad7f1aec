"""Contract 33: a generation is dropped as a whole, and nothing else."""

from contextlib import suppress

import pytest

from persistence.commit.faults import DROP, Fault, FaultOutcome, Injector, use
from persistence.contract.base import Contract, creating
from persistence.errors import Terminal, Transient
from persistence.protocol import FlowRef, Manifest, Progress, StateStore, Write

_MANY = 3_000
_LONG = b"k" * 600


def _fill(store: StateStore, flow: FlowRef, keys: list[bytes]) -> int:
    """Give a generation two stages, some states with due times, and a manifest; return its epoch."""
    epoch = store.acquire_epoch(flow)
    for stage in ("air", "aircraft"):  # the name of the first one begins the second one
        writes = [Write(key, 0, b"{}", 9 if number % 2 else None) for number, key in enumerate(keys)]
        store.save(flow.stage(stage), writes, epoch=epoch, batch=1)
    store.save_manifest(flow, Manifest(epoch, 1, {"legs": {0: Progress(7)}}))
    return epoch


def _is_gone(store: StateStore, flow: FlowRef) -> bool:
    stages = [flow.stage(name) for name in ("air", "aircraft")]
    return (
        not any(dict(store.scan(stage)) or [*store.due(stage, 99)] for stage in stages)
        and not any(one.mark.count or one.removed for stage in stages for one in store.marks(stage).values())
        and store.load_manifest(flow) is None
        and store.installed_epoch(flow) == 0
    )


class DropContract(Contract):
    """Everything of the generation leaves, its epoch last, and the others stay as they were."""

    def test_a_dropped_generation_is_gone_and_all_others_stay(
        self, store: StateStore, other: StateStore, flow: FlowRef
    ) -> None:
        limit = store.capabilities.max_key_bytes
        keys = [b"%05d" % n for n in range(_MANY)] + ([_LONG, _LONG + b"2"] if limit is None or limit > 700 else [])
        others = [FlowRef(flow.flow, 2), FlowRef(flow.flow, 11), FlowRef(f"{flow.flow}-1"), FlowRef(flow.flow[:-1])]
        for one in others:
            _fill(store, one, [b"a", b"b"])
        _fill(store, flow, keys)
        store.remove(flow.stage("air"), 5, epoch=store.installed_epoch(flow), batch=1)
        epoch = other.acquire_epoch(flow)
        other.drop(flow)
        assert _is_gone(store, flow)
        for one in others:
            assert store.installed_epoch(one) == 1
            assert store.load_manifest(one) == Manifest(1, 1, {"legs": {0: Progress(7)}})
            for stage in ("air", "aircraft"):
                assert {key for key, _ in store.scan(one.stage(stage))} == {b"a", b"b"}
                assert [*store.due(one.stage(stage), 9)] == [b"b"]
        assert epoch == 2

    def test_a_generation_of_which_there_is_nothing_is_dropped(self, store: StateStore, flow: FlowRef) -> None:
        store.drop(flow)
        assert _is_gone(store, flow)

    def test_runs_of_a_dropped_generation_write_nothing(
        self, store: StateStore, other: StateStore, flow: FlowRef
    ) -> None:  # 6
        epoch = _fill(store, flow, [b"a"])
        stage = flow.stage("aircraft")
        store.load(stage, [b"a", b"b"])
        newer = other.acquire_epoch(flow)
        other.drop(flow)
        for one in (epoch, newer):
            with pytest.raises(Terminal):
                store.save(stage, [*creating([b"b"]), Write(b"a", 1, b"{}")], epoch=one, batch=2)
            with pytest.raises(Terminal):
                store.save_manifest(flow, Manifest(one, 2))
        assert dict(other.scan(stage)) == {}
        assert other.load_manifest(flow) is None

    @pytest.mark.parametrize("outcome", [FaultOutcome.ERROR, FaultOutcome.UNANSWERED])
    @pytest.mark.parametrize("nth", range(1, 11))
    def test_a_drop_that_was_interrupted_is_repeated(
        self, store: StateStore, other: StateStore, flow: FlowRef, outcome: FaultOutcome, nth: int
    ) -> None:
        _fill(store, flow, [b"%d" % n for n in range(40)])
        store.acquire_epoch(flow)
        with use(Injector([Fault(DROP, outcome, nth)])), suppress(Transient):
            store.drop(flow)
        assert _is_gone(other, flow) or other.installed_epoch(flow)
        other.acquire_epoch(flow)
        other.drop(flow)
        assert _is_gone(store, flow)

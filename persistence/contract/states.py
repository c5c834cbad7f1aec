"""Contract 7 to 16 and 27: states, and the condition on which each is replaced."""

from contextlib import suppress
from typing import NoReturn

import pytest

from persistence.commit.faults import Fault, FaultOutcome, Injector, use, write_of
from persistence.contract.base import Contract, creating, load_one
from persistence.errors import Conflict, Terminal, Transient
from persistence.protocol import FlowRef, StageRef, StateStore, Stored, Write

_KEYS = {
    "empty": b"",
    "text": b"N14228",
    "unicode": "Zürich \N{AIRPLANE}".encode(),
    "binary": bytes(range(256)),
    "zero": b"\x00",
    "separators": b"a:b{c}d/e*f?[g]\\h\r\n'i\"j",
    "long": b"k" * 1024,
}


class _DiedError(BaseException):
    """Simulates the death of the process."""


def _die() -> NoReturn:
    raise _DiedError


class StateContract(Contract):
    """One value per key, replaced only by a writer that has loaded the previous value."""

    def test_only_existing_states_are_loaded(self, store: StateStore, stage: StageRef, epoch: int) -> None:  # 7
        assert store.load(stage, [b"a", b"b"]) == {}
        assert store.load(stage, []) == {}
        store.save(stage, creating([b"a"], b"1"), epoch=epoch, batch=7)
        assert store.load(stage, [b"a", b"b", b"a"]) == {b"a": Stored(1, epoch, 7, b"1")}

    @pytest.mark.parametrize("kind", _KEYS)
    def test_a_key_may_be_any_bytes(self, store: StateStore, stage: StageRef, epoch: int, kind: str) -> None:  # 7
        key = _KEYS[kind]
        store.save(stage, creating([key], b"1"), epoch=epoch, batch=0)
        store.save(stage, [Write(key, 1, b"2")], epoch=epoch, batch=1)
        assert store.load(stage, [key, b"other"]) == {key: Stored(2, epoch, 1, b"2")}
        assert dict(store.scan(stage)) == {key: Stored(2, epoch, 1, b"2")}

    def test_all_these_keys_at_once_stay_apart(self, store: StateStore, stage: StageRef, epoch: int) -> None:  # 7
        store.save(stage, [Write(key, 0, kind.encode()) for kind, key in _KEYS.items()], epoch=epoch, batch=0)
        held = store.load(stage, list(_KEYS.values()))
        assert {key: state.value for key, state in held.items()} == {k: kind.encode() for kind, k in _KEYS.items()}

    @pytest.mark.parametrize("size", [0, 1, 1 << 10, 1 << 20])
    def test_a_value_may_be_any_bytes(self, store: StateStore, stage: StageRef, epoch: int, size: int) -> None:  # 7, 8
        value = bytes(i * 7 & 0xFF for i in range(min(size, 999))) * (size // 999 + 1)
        value = value[:size]
        if store.capabilities.max_value_bytes is not None and size > store.capabilities.max_value_bytes:
            pytest.skip("the store declares a smaller limit for values")
        store.save(stage, creating([b"k"], value), epoch=epoch, batch=0)
        assert store.load(stage, [b"k"]) == {b"k": Stored(1, epoch, 0, value)}

    def test_a_key_or_value_over_the_limit_is_refused(self, store: StateStore, stage: StageRef, epoch: int) -> None:
        key, value = store.capabilities.max_key_bytes, store.capabilities.max_value_bytes
        if key is None and value is None:
            pytest.skip("the store declares no limits")
        for limit, write in [
            (key, Write(b"k" * ((key or 0) + 1), 0, b"")),
            (value, Write(b"k", 0, bytes((value or 0) + 1))),
        ]:
            if limit is not None:
                with pytest.raises(Terminal):
                    store.save(stage, [write], epoch=epoch, batch=0)
        assert list(store.scan(stage)) == []

    def test_what_one_handle_saved_another_loads(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 8
        for version in range(5):
            store.save(stage, [Write(b"k", version, b"%d" % version)], epoch=epoch, batch=version)
            assert other.load(stage, [b"k"]) == {b"k": Stored(version + 1, epoch, version, b"%d" % version)}

    @pytest.mark.parametrize("nth", [1, 2])
    @pytest.mark.parametrize("outcome", FaultOutcome)
    def test_a_save_that_ends_within_one_of_its_parts_is_finished_by_the_same_save(
        self, store: StateStore, stage: StageRef, epoch: int, outcome: FaultOutcome, nth: int
    ) -> None:  # 10, 14
        writes = creating([b"%d" % i for i in range(300)], bytes(500))
        point = write_of(stage.stage)
        with use(Injector([Fault(point, outcome, nth)], crash=_die)) as injector, suppress(_DiedError, Transient):
            store.save(stage, writes, epoch=epoch, batch=3)
        if not injector.reached[point]:
            pytest.skip("the store's writes are no fault points (persistence.commit.faults.write_of)")
        store.save(stage, writes, epoch=epoch, batch=3)
        assert store.load(stage, [write.key for write in writes]) == {
            write.key: Stored(1, epoch, 3, write.value) for write in writes
        }

    @pytest.mark.parametrize("expected", [0, 1, 3, 4])
    def test_a_state_of_another_version_is_not_replaced(
        self, store: StateStore, stage: StageRef, epoch: int, expected: int
    ) -> None:  # 9, 12
        for version in range(2):
            store.save(stage, [Write(b"k", version, b"x")], epoch=epoch, batch=version)
        with pytest.raises(Conflict) as caught:
            store.save(stage, [Write(b"k", expected, b"y")], epoch=epoch, batch=9)
        assert caught.value.keys == (b"k",)
        assert load_one(store, stage, b"k") == Stored(2, epoch, 1, b"x")

    def test_a_state_that_does_not_exist_is_not_replaced(self, store: StateStore, stage: StageRef, epoch: int) -> None:
        with pytest.raises(Conflict) as caught:
            store.save(stage, [Write(b"gone", 3, b"y")], epoch=epoch, batch=9)
        assert caught.value.keys == (b"gone",)
        assert store.load(stage, [b"gone"]) == {}

    def test_the_same_write_again_succeeds_and_changes_nothing(
        self, store: StateStore, other: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 10
        for version in range(2):
            writes = [Write(b"%d" % i, version, b"v%d" % version) for i in range(3)]
            store.save(stage, writes, epoch=epoch, batch=version)
            before = store.load(stage, [b"0", b"1", b"2"])
            store.save(stage, writes, epoch=epoch, batch=version)
            other.save(stage, writes, epoch=epoch, batch=version)
            assert store.load(stage, [b"0", b"1", b"2"]) == before

    def test_a_half_applied_write_is_completed_by_repeating_it(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 10
        store.save(stage, creating([b"a", b"b"], b"0"), epoch=epoch, batch=0)
        writes = [Write(b"a", 1, b"1"), Write(b"b", 1, b"1"), Write(b"c", 0, b"1"), Write(b"d", 0, b"1")]
        store.save(stage, writes[1:3], epoch=epoch, batch=1)
        store.save(stage, writes, epoch=epoch, batch=1)
        held = store.load(stage, [b"a", b"b", b"c", b"d"])
        assert {key: (state.version, state.value) for key, state in held.items()} == {
            b"a": (2, b"1"),
            b"b": (2, b"1"),
            b"c": (1, b"1"),
            b"d": (1, b"1"),
        }

    @pytest.mark.parametrize("change", ["value", "batch", "epoch"])
    def test_a_write_that_differs_in_anything_is_not_a_repetition(
        self, store: StateStore, stage: StageRef, epoch: int, change: str
    ) -> None:  # 10, 12
        store.save(stage, creating([b"k"], b"1"), epoch=epoch, batch=1)
        mine = store.acquire_epoch(stage.flow_ref) if change == "epoch" else epoch
        with pytest.raises(Conflict):
            store.save(
                stage, creating([b"k"], b"2" if change == "value" else b"1"), epoch=mine, batch=1 + (change == "batch")
            )
        assert load_one(store, stage, b"k") == Stored(1, epoch, 1, b"1")

    def test_a_conflict_names_exactly_the_changed_keys(self, store: StateStore, stage: StageRef, epoch: int) -> None:
        # 12: a wrong version, a missing state, an unexpected state; with retried and valid writes in the same call.
        store.save(stage, creating([b"wrong", b"there", b"good"], b"0"), epoch=epoch, batch=0)
        store.save(stage, creating([b"retried"], b"1"), epoch=epoch, batch=1)
        writes = [
            Write(b"good", 1, b"1"),
            Write(b"wrong", 5, b"1"),
            Write(b"retried", 0, b"1"),
            Write(b"missing", 1, b"1"),
            Write(b"there", 0, b"1"),
            Write(b"new", 0, b"1"),
        ]
        with pytest.raises(Conflict) as caught:
            store.save(stage, writes, epoch=epoch, batch=1)
        assert caught.value.keys == (b"wrong", b"missing", b"there")
        assert caught.value.ref == stage
        held = store.load(stage, [write.key for write in writes])
        assert held[b"wrong"] == held[b"there"] == Stored(1, epoch, 0, b"0")
        assert held[b"retried"] == Stored(1, epoch, 1, b"1")
        assert b"missing" not in held
        old = [Stored(1, epoch, 0, b"0"), None]
        if store.capabilities.atomic_save:
            assert [held[b"good"], held.get(b"new")] == old
        else:
            assert held[b"good"] in (old[0], Stored(2, epoch, 1, b"1"))
            assert held.get(b"new") in (None, Stored(1, epoch, 1, b"1"))

    def test_a_call_may_have_thousands_of_writes(self, store: StateStore, stage: StageRef, epoch: int) -> None:  # 13
        keys = [b"N%05d" % i for i in range(5000)]
        value = b"v" * 300
        store.save(stage, creating(keys, value), epoch=epoch, batch=0)
        store.save(stage, [Write(key, 1, value) for key in keys[::2]], epoch=epoch, batch=1)
        held = store.load(stage, keys)
        assert [held[key].version for key in keys] == [2, 1] * 2500

    def test_one_conflict_among_thousands_is_found(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 12, 13
        keys = [b"N%05d" % i for i in range(5000)]
        store.save(stage, creating([keys[3210]], b"theirs"), epoch=epoch, batch=0)
        with pytest.raises(Conflict) as caught:
            store.save(stage, creating(keys), epoch=epoch, batch=1)
        assert caught.value.keys == (keys[3210],)
        assert load_one(store, stage, keys[3210]) == Stored(1, epoch, 0, b"theirs")

    def test_no_writes_do_nothing(self, store: StateStore, stage: StageRef, epoch: int) -> None:  # 13
        store.save(stage, [], epoch=epoch, batch=0)
        assert list(store.scan(stage)) == []

    def test_the_same_key_twice_is_refused(self, store: StateStore, stage: StageRef, epoch: int) -> None:  # 13
        with pytest.raises(ValueError, match=f"{stage.stage}.*twice"):
            store.save(stage, creating([b"a", b"k", b"b", b"k"]), epoch=epoch, batch=0)
        assert list(store.scan(stage)) == []

    def test_stages_generations_and_flows_never_touch(self, store: StateStore, flow: FlowRef, epoch: int) -> None:  # 15
        rebuilt, longer = FlowRef(flow.flow, 2), FlowRef(f"{flow.flow}.1")
        stages = [flow.stage("a"), flow.stage("a.b"), flow.stage("b"), rebuilt.stage("a"), longer.stage("a")]
        for number, stage in enumerate(stages):
            store.install_epoch(stage.flow_ref, epoch)
            store.save(stage, creating([b"k"], b"%d" % number), epoch=epoch, batch=0)
        for number, stage in enumerate(stages):
            assert store.load(stage, [b"k"]) == {b"k": Stored(1, epoch, 0, b"%d" % number)}
            assert list(store.scan(stage)) == [(b"k", Stored(1, epoch, 0, b"%d" % number))]

    def test_a_scan_yields_every_state_once(self, store: StateStore, stage: StageRef, epoch: int) -> None:  # 16
        keys = [b"N%05d" % (i * 7919 % 5000) for i in range(5000)]
        assert list(store.scan(stage)) == []
        store.save(stage, creating(keys, b"v"), epoch=epoch, batch=0)
        scanned = [key for key, _ in store.scan(stage)]
        assert sorted(scanned) == sorted(keys)
        if store.capabilities.ordered_scan:
            assert scanned == sorted(keys)

    @pytest.mark.parametrize(
        ("begin", "end"),
        [
            (b"N01", b"N02"),
            (b"N01234", None),
            (b"", b"N00001"),
            (b"N01\x00", b"N01"),
            (b"k" * 600, b"k" * 600 + b"c"),
            (b"z", None),
        ],
    )
    def test_a_scan_of_a_range_yields_its_keys_and_no_others(
        self, store: StateStore, stage: StageRef, epoch: int, begin: bytes, end: bytes | None
    ) -> None:  # 27
        assert list(store.scan(stage, begin=begin, end=end)) == []
        long = [b"k" * size + tail for size in (474, 475, 476, 599, 600) for tail in (b"", b"a", b"b", b"c")]
        keys = [b"", b"\x00", b"\xff\xff", *{*long}, *(b"N%05d" % i for i in range(2500))]
        store.save(stage, creating(keys, b"v"), epoch=epoch, batch=0)
        scanned = [key for key, _ in store.scan(stage, begin=begin, end=end)]
        assert sorted(scanned) == sorted(key for key in keys if key >= begin and (end is None or key < end))
        if store.capabilities.ordered_scan:
            assert scanned == sorted(scanned)

    def test_the_scans_of_all_buckets_yield_every_state_once(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 27
        keys = [b"N%05d" % i for i in range(2000)]
        store.save(stage, creating(keys, b"v"), epoch=epoch, batch=0)
        buckets = store.marks(stage)
        if not buckets:
            pytest.skip("the store keeps no marks")
        parts = [[key for key, _ in store.scan(stage, bucket=name, begin=b"N00100")] for name in buckets]
        assert sorted(key for part in parts for key in part) == keys[100:]

    def test_a_scan_goes_on_while_states_are_written(
        self, store: StateStore, stage: StageRef, epoch: int
    ) -> None:  # 16
        keys = [b"N%05d" % i for i in range(4000)]
        store.save(stage, creating(keys, b"0"), epoch=epoch, batch=0)
        scan = store.scan(stage)
        seen = [next(scan)[0]]
        store.save(stage, [Write(key, 1, b"1") for key in keys], epoch=epoch, batch=1)
        store.save(stage, creating([b"M%05d" % i for i in range(100)], b"1"), epoch=epoch, batch=1)
        seen += [key for key, _ in scan]
        assert len(seen) == len(set(seen))
        assert set(seen) >= set(keys)

"""The pointer to the live generation, which is a state like any other: see `persistence.pointer`."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest

from persistence.commit.faults import Fault, FaultOutcome, Injector, use
from persistence.contract.base import Contract, creating
from persistence.errors import Fenced, StoreError, Transient
from persistence.memory import MemoryStore
from persistence.pointer import Change, Pointer, Rebuild, change_pointer, copy_pointer, load_pointer
from persistence.protocol import FlowRef, StateStore

T = TypeVar("T")
NEXT = Pointer(live=2, previous=1, newest=2, changes=(Change(7, "ann@host", "swap", 2, "a corrected fold"),))


class PointerContract(Contract):
    """A pointer is replaced as a whole, if it was not changed since, and never by a command that was overtaken."""

    def test_a_flow_without_a_pointer_has_one_live_generation(self, store: StateStore, flow: FlowRef) -> None:
        assert load_pointer([store], flow.flow) == Pointer()
        assert Pointer().live == 1

    def test_a_changed_pointer_is_seen_by_every_handle(
        self, store: StateStore, other: StateStore, flow: FlowRef
    ) -> None:
        found = change_pointer([store], flow.flow, Pointer(), NEXT)
        assert found == msgspec.structs.replace(NEXT, version=1)
        assert load_pointer([other], flow.flow) == found
        rebuild = msgspec.structs.replace(found, rebuild=Rebuild(3, 2, "host/17"), closing=2)
        assert change_pointer([other], flow.flow, found, rebuild).version == 2
        assert load_pointer([store], flow.flow).rebuild == Rebuild(3, 2, "host/17")

    def test_a_pointer_that_was_changed_since_is_not_replaced(
        self, store: StateStore, other: StateStore, flow: FlowRef
    ) -> None:
        found = change_pointer([other], flow.flow, Pointer(), NEXT)
        with pytest.raises(Fenced, match="look again"):
            change_pointer([store], flow.flow, Pointer(), msgspec.structs.replace(NEXT, live=3))
        assert load_pointer([store], flow.flow) == found

    def test_a_command_that_was_overtaken_writes_nothing(
        self, store: StateStore, other: StateStore, flow: FlowRef
    ) -> None:
        def overtake() -> None:
            change_pointer([other], flow.flow, Pointer(), NEXT)

        with use(At(2, overtake)), pytest.raises(StoreError):
            change_pointer([store], flow.flow, Pointer(), msgspec.structs.replace(NEXT, live=3))
        assert load_pointer([store], flow.flow).live == 2

    def test_states_and_epochs_of_the_generations_do_not_notice_it(self, store: StateStore, flow: FlowRef) -> None:
        epoch = store.acquire_epoch(flow)
        change_pointer([store], flow.flow, Pointer(), NEXT)
        assert store.installed_epoch(flow) == epoch
        store.save(flow.stage("aircraft"), creating([b"k"]), epoch=epoch, batch=1)
        assert store.load_manifest(FlowRef(flow.flow, 0)) is None

    @pytest.mark.parametrize("outcome", [FaultOutcome.ERROR, FaultOutcome.UNANSWERED])
    @pytest.mark.parametrize("nth", [1, 2, 3, 4])
    @pytest.mark.parametrize("decides", [True, False])
    def test_a_change_that_fails_between_two_stores_is_complete_after_the_next_start(
        self, store: StateStore, flow: FlowRef, outcome: FaultOutcome, nth: int, *, decides: bool
    ) -> None:
        stores = [store, MemoryStore()] if decides else [MemoryStore(), store]
        first = change_pointer(stores, flow.flow, Pointer(), NEXT)
        wanted = msgspec.structs.replace(first, live=1, previous=2)
        with use(Injector([Fault("pointer", outcome, nth)])), pytest.raises(Transient):
            change_pointer(stores, flow.flow, first, wanted)
        seen = load_pointer(stores, flow.flow)
        assert seen.live == (1 if (nth, outcome) >= (3, FaultOutcome.UNANSWERED) or nth == 4 else 2)
        assert copy_pointer(stores, flow.flow) == seen
        assert [load_pointer([one], flow.flow) for one in stores] == [seen, seen]


class At:
    """Calls something right before the `nth` effect."""

    def __init__(self, nth: int, action: Callable[[], object]) -> None:
        self._left = nth
        self._action = action

    def effect(self, _: str, action: Callable[[], T]) -> T:
        self._left -= 1
        if self._left == 0:
            self._action()
        return action()

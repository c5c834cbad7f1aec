"""Outputs of a rebuild that are held until the swap: all of them leave, in order, wherever a command dies."""

from collections.abc import Callable
from typing import Any

import pytest

from aggregations.engine.held import forget_held
from aggregations.errors import RunRefusedError
from aggregations.per_message.publishing import OutputMessage
from aggregations.run import memory
from aggregations.run.held_outputs import HELD_OUTPUTS, HeldOutput, held_outputs, hold_outputs
from envelope import Node
from persistence.commit.faults import use
from persistence.commit.order import commit
from persistence.errors import Corrupt
from persistence.memory import MemoryStore
from persistence.names import FlowRef
from persistence.protocol import Write
from tests.support.replays import NEW, OLD, CrashAt, Land, dies

FLOW = FlowRef("fleet", 2)


def begun() -> Land:
    """A live generation that has folded a part of the log, with a run at work."""
    land = Land.on(apart=True, length=12)
    land.holds = True
    land.go_on(5)
    return land


def effects(action: Callable[[], object]) -> int:
    with use(CrashAt(0, applied=False)) as counted:
        action()
    return counted.reached


def check_sent(land: Land) -> None:
    """Everything that the rebuild made up to the swap was sent; the first time each output comes, it is in order."""
    end = land.position(2)
    assert {*land.sent[2]} == {*range(1, end)}
    first = [*dict.fromkeys(land.sent[2])]
    assert first == sorted(first)


def test_the_swap_sends_them_in_order_and_once() -> None:
    land = begun()
    land.rebuild(NEW, meanwhile=lambda: land.go_on(1))
    assert land.sent == {}
    land.length = 20
    land.go_on(4)
    assert land.swap().outputs == len(land.sent[2]) == land.position(2) - 1
    assert land.sent[2] == [*range(1, land.position(2))]
    before = [*land.sent[2]]
    land.go_on(30)
    assert land.sent == {2: before}
    assert land.published[-1] == 19


@pytest.mark.parametrize("applied", [False, True])
def test_a_rebuild_that_dies_at_any_effect_loses_none(*, applied: bool) -> None:
    trial = begun()
    for nth in range(1, effects(lambda: trial.rebuild(NEW)) + 1):
        land = begun()
        assert dies(lambda land=land: land.rebuild(NEW), nth, applied=applied)  # type: ignore[misc]
        land.go_on(2)
        land.rebuild(NEW, size=3)
        land.swap()
        check_sent(land)


@pytest.mark.parametrize("applied", [False, True])
def test_a_swap_that_dies_at_any_effect_loses_none(*, applied: bool) -> None:
    def rebuilt() -> Land:
        land = begun()
        land.rebuild(NEW)
        land.go_on(3)
        return land

    for nth in range(1, effects(rebuilt().swap) + 1):
        land = rebuilt()
        assert dies(land.swap, nth, applied=applied)
        if land.pointer().live == 1:
            land.swap()
        check_sent(land)


def test_without_the_option_none_is_held() -> None:
    land = begun()
    land.holds = False
    land.rebuild(NEW)
    assert land.swap().outputs == 0
    assert land.sent == {2: []}


def test_the_choice_is_made_when_the_rebuild_begins() -> None:
    land = begun()
    land.holds = False
    land.rebuild(OLD)
    land.holds = True
    with pytest.raises(RunRefusedError, match=r"generation 2: the outputs of its rebuild are dropped since it began"):
        land.rebuild(OLD)


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that are held only after their states are written are lost in a crash in between."""

    def late(publish: Any, persist: Any, manifests: Any) -> None:
        commit(lambda: None, persist, [])
        publish()
        commit(lambda: None, [], manifests)

    monkeypatch.setattr(memory, "commit", late)
    with pytest.raises(AssertionError):
        test_a_rebuild_that_dies_at_any_effect_loses_none(applied=True)


def output(offset: int, size: int = 4) -> OutputMessage:
    return OutputMessage("out", b"k%d" % offset, b"v" * size, (("h", None),), own=Node("legs", 0, offset, ""))


class Unordered(MemoryStore):
    """A store whose scans are in no order, like that of Redis."""

    @property
    def capabilities(self) -> Any:
        from dataclasses import replace

        return replace(super().capabilities, ordered_scan=False)

    def scan(self, stage: Any, **part: Any) -> Any:
        return iter([*super().scan(stage, **part)][::-1])


@pytest.mark.parametrize("kind", [MemoryStore, Unordered])
def test_entries_are_bounded_and_read_in_the_order_of_epoch_attempt_and_record(kind: type[MemoryStore]) -> None:
    store = kind()
    for _ in range(3):
        store.acquire_epoch(FLOW)
    big = [output(n, 100_000) for n in range(300, 307)]
    for attempt, outputs in ((300, [output(20)]), (2, [output(9)]), (2, [output(8)]), (7, big), (7, big)):
        hold_outputs(store, FLOW, outputs, epoch=3, batch=attempt, attempt=attempt)
    store.acquire_epoch(FLOW)
    hold_outputs(store, FLOW, [output(1)], epoch=4, batch=1, attempt=1)
    found = [*held_outputs(store, FLOW)]
    assert [one.key for one in found] == [b"k%d" % n for n in (8, 9, *range(300, 307), 20, 1)]
    assert found[0] == HeldOutput("out", b"k8", b"vvvv", [("h", None)])
    assert len([*store.scan(FLOW.stage(HELD_OUTPUTS))]) == 4 + 4
    forget_held(store, FLOW.stage(HELD_OUTPUTS), epoch=4)
    assert [*held_outputs(store, FLOW)] == []


def test_a_damaged_entry_is_named() -> None:
    store = MemoryStore()
    epoch = store.acquire_epoch(FLOW)
    store.save(FLOW.stage(HELD_OUTPUTS), [Write(b"k", 0, b"{}")], epoch=epoch, batch=1)
    with pytest.raises(Corrupt, match="held outputs cannot be read"):
        list(held_outputs(store, FLOW))

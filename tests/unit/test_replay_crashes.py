"""A rebuild, a swap and a rollback that die at any effect, while the run of the live generation goes on."""

from collections.abc import Callable, Iterator

import pytest

from aggregations.errors import RunRefusedError
from jobs.replaying.generations import begin_rebuild, generations_of
from persistence.commit.faults import use
from persistence.errors import Fenced
from persistence.pointer import MOST_CHANGES
from tests.support.replays import NEW, OLD, CrashAt, Land, author_of, dies


def begun(*, apart: bool) -> Land:
    """A live generation that has folded a part of the log, with a run at work."""
    land = Land.on(apart=apart, length=12)
    land.go_on(5)
    return land


def check(land: Land, generation: int) -> None:
    """The flow continues on this generation, and every event is in its states once and has been published."""
    land.length += 3
    for _ in range(land.length):
        land.go_on(3)
    assert land.pointer().live == generation
    assert land.pointer().closing == 0
    assert land.position(generation) == land.length
    assert land.results(generation) == land.expected(generation, land.length)
    assert {*land.published} == {*range(1, land.length)}  # the filter removes offset 0


def effects(action: Callable[[], object]) -> int:
    with use(CrashAt(0, applied=False)) as counted:
        action()
    return counted.reached


def lands_of_a_swap_that_died(*, applied: bool) -> Iterator[Land]:
    """One land for each effect at which the command can die, after a batch of the live run."""

    def rebuilt() -> Land:
        land = begun(apart=True)
        land.rebuild(NEW)
        land.go_on(3)
        return land

    for nth in range(1, effects(rebuilt().swap) + 1):
        land = rebuilt()
        assert dies(land.swap, nth, applied=applied)
        yield land


def until_done(action: Callable[[], object]) -> None:
    """Repeat a command as an operator does; at the end it says that there is nothing left to do."""
    for _ in range(3):
        try:
            action()
        except RunRefusedError as error:
            assert "no generation is being rebuilt" in str(error)
            return


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("code", [OLD, NEW], ids=["same", "redefined"])
def test_a_rebuild_becomes_live_with_exactly_the_records_of_the_live_generation(code, apart):
    land = begun(apart=apart)
    assert land.rebuild(code, meanwhile=lambda: land.go_on(1)) == 2
    assert land.pointer().live == 1
    land.length = 40
    land.go_on(2)
    done = land.swap(meanwhile=lambda: land.go_on(1))
    assert (done.done, done.live, done.previous) == (True, 2, 1)
    assert land.results(2) == land.expected(2, land.position(1))
    assert land.run is None  # it was fenced, and could not begin again during the swap
    check(land, 2)


@pytest.mark.parametrize("applied", [False, True])
def test_a_rebuild_that_dies_at_any_effect_is_repeated(applied):
    trial = begun(apart=True)
    for nth in range(1, effects(lambda: trial.rebuild(NEW)) + 1):
        land = begun(apart=True)
        assert dies(lambda land=land: land.rebuild(NEW, meanwhile=lambda: land.go_on(1)), nth, applied=applied)
        land.code.setdefault(2, NEW)
        land.go_on(1)
        assert land.results(1) == land.expected(1, land.position(1))
        land.rebuild(NEW)
        until_done(land.swap)
        check(land, 2)


@pytest.mark.parametrize("applied", [False, True])
def test_a_swap_that_dies_at_any_effect_is_repeated(applied):
    for land in lands_of_a_swap_that_died(applied=applied):
        land.go_on(1)
        land.go_on(1)
        until_done(land.swap)
        check(land, 2)


@pytest.mark.parametrize("applied", [False, True])
def test_a_swap_that_died_at_any_effect_is_taken_back(applied):
    for land in lands_of_a_swap_that_died(applied=applied):
        assert land.roll_back().live == 1
        check(land, 1)


@pytest.mark.parametrize("applied", [False, True])
def test_a_rollback_that_dies_at_any_effect_is_repeated(applied):
    def swapped() -> Land:
        land = begun(apart=True)
        land.rebuild(NEW)
        land.swap()
        land.go_on(3)
        return land

    for nth in range(1, effects(swapped().roll_back) + 1):
        land = swapped()
        assert dies(land.roll_back, nth, applied=applied)
        land.go_on(1)
        if land.pointer().live == 2:
            land.roll_back()
        check(land, 1)


def test_whatever_was_frozen_writes_nothing_into_the_generation_before():
    land = begun(apart=True)
    land.start()
    land.go_on(1)
    land.rebuild(NEW)
    land.start()
    assert len(land.stale) == 2
    land.stale.append(land.run)
    land.run = None
    land.swap()
    before = land.results(1), land.position(1)
    for number in range(3):
        assert not land.wake(number, 2)
    assert (land.results(1), land.position(1)) == before
    check(land, 2)


def test_a_swap_that_is_declined_leaves_the_live_generation_live():
    land = begun(apart=True)
    land.rebuild(NEW)
    assert not land.swap(agreed=False).done
    land.go_on(2)
    assert land.pointer().live == 1
    land.swap()
    check(land, 2)


def test_a_rollback_is_rolled_back():
    land = begun(apart=False)
    land.rebuild(NEW)
    land.swap()
    land.go_on(3)
    assert land.roll_back().live == 1
    land.go_on(4)
    assert land.roll_back().live == 2
    check(land, 2)
    assert [(one.what, one.generation) for one in land.pointer().changes] == [
        ("rebuild", 2),
        ("swap", 2),
        ("rollback", 1),
        ("rollback", 2),
    ]


def taken_over(land: Land) -> str:
    """Let another process take over the rebuild; return its name."""
    author = author_of("swap")
    with generations_of(NEW, land.urls) as found:
        begin_rebuild(found, author, live=1, redefined=False)
    return author.worker


def rebuilt() -> Land:
    """A live generation with a rebuild that is behind it, and no run at work."""
    land = begun(apart=True)
    land.rebuild(NEW)
    land.go_on(3)
    land.run = None
    return land


def test_a_swap_that_fails_after_another_process_took_over_leaves_the_flow_to_it(monkeypatch):
    land = rebuilt()
    others: list[str] = []

    def fails(*_: object) -> None:
        others.append(taken_over(land))
        raise RuntimeError("no room for the states")

    with monkeypatch.context() as patch:
        patch.setattr(Land, "compare", fails)
        with pytest.raises(RuntimeError):
            land.swap()
    pointer = land.pointer()
    assert (pointer.closing, pointer.rebuild.worker) == (1, others[0])
    land.go_on(1)
    assert land.run is None
    land.swap()
    check(land, 2)


def test_a_swap_that_another_process_took_over_does_not_stop_the_live_run():
    land = rebuilt()
    others: list[str] = []
    with pytest.raises((RunRefusedError, Fenced)):
        land.swap(meanwhile=lambda: others.append(taken_over(land)))
    pointer = land.pointer()
    assert (pointer.closing, pointer.rebuild.worker) == (0, others[-1])
    land.go_on(1)
    assert land.run is not None


def test_a_swap_that_was_taken_back_meanwhile_sends_nothing(monkeypatch):
    land = rebuilt()
    sent: list[None] = []
    compare = Land.compare

    def taken_back(_: Land, old: int, new: int) -> object:
        found = compare(land, old, new)
        land.roll_back()
        monkeypatch.setattr(Land, "compare", compare)
        return found

    monkeypatch.setattr(Land, "compare", taken_back)
    with pytest.raises(RunRefusedError, match="another command has taken over the rebuild, or has ended it"):
        land.swap(meanwhile=lambda: sent.append(None) if land.pointer().closing == 0 else None)
    assert len(sent) == 2  # the batches of the rebuild before the live run was stopped
    land.go_on(1)
    land.swap()
    check(land, 2)


def test_a_rebuild_is_continued_however_often_its_swap_is_declined():
    land = rebuilt()
    for _ in range(MOST_CHANGES + 1):
        assert not land.swap(agreed=False).done
    changes = land.pointer().changes
    assert len(changes) == MOST_CHANGES
    assert (changes[0].what, changes[0].generation) == ("rebuild", 2)
    land.swap()
    assert [one.what for one in land.pointer().changes[-2:]] == ["rollback", "swap"]
    check(land, 2)


def test_a_rebuild_that_died_before_it_wrote_anything_may_get_another_definition():
    trial, land = begun(apart=True), begun(apart=True)
    with use(CrashAt(0, applied=False)) as counted:
        trial.rebuild(OLD)
    assert dies(lambda: land.rebuild(OLD), counted.points.index("epoch") + 1, applied=False)
    assert not land.pointer().rebuild.redefined
    land.rebuild(NEW)
    assert land.pointer().rebuild.redefined  # the swap asks for it
    land.swap()
    check(land, 2)

"""A mend that dies at any effect: it is repeated, or the flow goes on without it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aggregations.per_message.stage import KeyState
from aggregations.run import mend
from aggregations.run.mend import Mending
from envelope import Histories
from persistence.commit.faults import use
from persistence.errors import Fenced
from tests.support.mends import Site, same_as_its_log, seen_by_readers
from tests.support.pure import batch, fleet, leg
from tests.support.replays import CrashAt, dies
from tests.unit.test_mend import again, chains, enveloped, publishing

STAGES = ("aircraft", "carrier")
KEYS = (b"N0", b"N1", b"N9")


def spoiled(directory: Path, *, apart: bool) -> Site:
    """A flow with a wrong state, a lost one, and one too many."""
    directory.mkdir()
    site = Site(fleet(), directory, apart=apart)
    site.run(batch(*range(1, 20)))
    site.spoil("aircraft", b"N0", n=-1)
    site.lose("aircraft", b"N1")
    site.spoil("aircraft", b"N9", site.held("aircraft")[b"N2"], n=3, m=3)
    return site


def dead(make: Callable[[Path], Site], keys: tuple[bytes, ...], tmp_path: Path, *, applied: bool) -> Iterator[Site]:
    """One site for each effect at which a mend can die."""
    trial = make(tmp_path / "trial")
    with use(CrashAt(0, applied=False)) as counted:
        trial.mend("aircraft", *keys)
    assert {"epoch", "pointer", "mend", "write:aircraft"} <= {*counted.points}
    for nth in range(1, counted.reached + 1):
        site = make(tmp_path / f"{nth}")
        assert dies(lambda site=site: site.mend("aircraft", *keys), nth, applied=applied)  # type: ignore[misc]
        yield site


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_a_mend_that_dies_at_any_effect_is_repeated(tmp_path: Path, apart: bool, applied: bool) -> None:
    for site in dead(lambda at: spoiled(at, apart=apart), KEYS, tmp_path, applied=applied):
        left = site.mend("aircraft", *KEYS)
        assert left in ({}, {b"N0": Mending.CHANGED, b"N1": Mending.PUT_BACK, b"N9": Mending.EMPTIED})
        same_as_its_log(site, STAGES)
        assert {one.what for one in site.pointer().changes} == {"mend"}
        site.run(batch(*range(20, 30)))
        same_as_its_log(site, STAGES)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_after_a_mend_that_died_the_flow_goes_on_and_is_mended_later(
    tmp_path: Path, apart: bool, applied: bool
) -> None:
    for site in dead(lambda at: spoiled(at, apart=apart), KEYS, tmp_path, applied=applied):
        run = site.run([leg(20, "N2", carrier="AA", minutes=1), leg(21, "N9", carrier="UA", minutes=1)])
        assert not run.run.crashed
        site.mend("aircraft", *KEYS)
        same_as_its_log(site, STAGES)


def watched(directory: Path) -> Site:
    directory.mkdir()
    site = Site(publishing(), directory)
    site.run(batch(*range(1, 12)))
    site.spoil("aircraft", b"N1", n=-1)
    site.spoil("aircraft", b"N9", site.held("aircraft")[b"N2"], n=3, m=3)
    site.run([leg(12, "N1", minutes=1), leg(13, "N9", minutes=1)])  # so that readers see what is wrong
    site.lose("aircraft", b"N2")
    return site


@pytest.mark.parametrize("applied", [False, True])
def test_readers_of_published_states_see_the_mended_ones_wherever_the_mend_died(tmp_path: Path, applied: bool) -> None:
    for site in dead(watched, (b"N1", b"N2", b"N9"), tmp_path, applied=applied):
        site.mend("aircraft", b"N1", b"N2", b"N9")
        assert seen_by_readers(site.outputs) == site.results("aircraft")


def test_what_was_frozen_before_a_mend_writes_nothing_afterwards(tmp_path: Path) -> None:
    site = spoiled(tmp_path / "site", apart=True)
    frozen = site.runner()
    frozen.run.finish()
    site.mend("aircraft", *KEYS)
    with pytest.raises(Fenced):
        frozen.process(batch(20, 21))
    same_as_its_log(site, STAGES)


def without_positions(_stage: object, _key: bytes, _old: Histories, new: Histories, _batch: int) -> Histories:
    return Histories({lane: replace(one, held=(), floor=None) for lane, one in new.lanes.items()})


def with_the_old_positions(_stage: object, _key: bytes, old: Histories, _new: Histories, _batch: int) -> Histories:
    return old


@pytest.mark.parametrize("bug", [without_positions, with_the_old_positions])
def test_a_mend_with_other_positions_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Callable[..., Any]
) -> None:
    site = Site(enveloped(), tmp_path)
    site.run(chains(0, 30))
    site.lose("aircraft", b"N1")
    monkeypatch.setattr(mend, "_histories", bug)
    site.mend("aircraft", b"N1")
    site.run([again(30, 28)])
    with pytest.raises(AssertionError):
        same_as_its_log(site, STAGES)


def test_a_mend_that_writes_before_it_publishes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = mend.mended_snapshots_of

    def later(stage: Any, states: dict[bytes, KeyState], before: Any, **given: Any) -> Any:
        mend.save_states(run_of[0], stage, states)
        return made(stage, states, before, **given)

    run_of: list[Any] = []
    check = mend.check_can_mend

    def checked(run: Any, *given: Any) -> Any:
        run_of[:] = [run]
        return check(run, *given)

    monkeypatch.setattr("tests.support.mends.check_can_mend", checked)
    monkeypatch.setattr(mend, "mended_snapshots_of", later)
    with pytest.raises(AssertionError):
        test_readers_of_published_states_see_the_mended_ones_wherever_the_mend_died(tmp_path, applied=False)

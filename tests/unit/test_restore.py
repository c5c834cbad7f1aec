"""An interrupted restore is repeated with the stores that it began to fill; others, and live states, stay as they are."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from aggregations.errors import RunRefusedError
from aggregations.run.memory import MemoryRunner
from jobs.backup import restore, snapshot
from jobs.cli.errors import Exit
from jobs.views import states
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Fenced
from persistence.memory import open_store as memory
from persistence.names import FlowRef
from tests.support.cli import run as headwater
from tests.support.pure import batch, fresh_store, leg
from tests.support.topics import InMemory
from tests.unit.test_backup import FLOW, Crash, crash, held, ran, stores

REF = FlowRef("fleet")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A snapshot of three records."""
    urls = stores(fresh_store())
    with closing(ran(urls, batch(1, 2, 3))):
        snapshot(FLOW, tmp_path / "saved", stores=urls)
    return tmp_path / "saved"


def apart() -> dict[str, str]:
    return {"aircraft": fresh_store(), "carrier": fresh_store()}


def interrupted(saved: Path, urls: dict[str, str], nth: int) -> None:
    with faults.use(Injector([Fault("restore", FaultOutcome.BEFORE, nth)], crash)), pytest.raises(Crash):
        restore(FLOW, saved, stores=urls)


@pytest.mark.parametrize("nth", range(2, 7))
@pytest.mark.parametrize("stage", ["aircraft", "carrier"])
def test_a_live_store_is_not_taken_for_one_of_an_interrupted_restore(saved: Path, stage: str, nth: int) -> None:
    urls, live = apart(), apart()
    with closing(ran(live, batch(*range(9)))) as run:
        before = held(run)
        interrupted(saved, urls, nth)
        with pytest.raises(RunRefusedError, match="contains states"):
            restore(FLOW, saved, stores={**urls, stage: live[stage]})
        run.process(batch(9))  # its manifests and its epoch are as they were
        assert held(run) != before
    restore(FLOW, saved, stores=urls)


def test_states_without_a_manifest_are_not_taken_for_those_of_an_interrupted_restore(saved: Path) -> None:
    urls, live = apart(), apart()
    ran(live, batch(*range(9))).close()
    interrupted(saved, urls, 2)
    del memory(live["aircraft"])._manifests[REF]
    with pytest.raises(RunRefusedError, match="store of stage aircraft contains states"):
        restore(FLOW, saved, stores={**urls, "aircraft": live["aircraft"]})


def test_a_run_that_is_refused_does_not_end_the_restore_at_work(saved: Path) -> None:
    urls, refused = apart(), list[str]()

    class Beside(Injector):
        """A run begins before each step, as one that is started again and again."""

        def effect(self, point, action):  # type: ignore[no-untyped-def]
            if point == "restore" and any(memory(url).load_manifest(REF) for url in urls.values()):
                with pytest.raises(RunRefusedError, match="being restored"), faults.use(Injector()):
                    MemoryRunner(FLOW, urls)
                refused.append(point)
            return super().effect(point, action)

    with faults.use(Beside()):
        restore(FLOW, saved, stores=urls)
    assert len(refused) >= 4
    with closing(MemoryRunner(FLOW, urls, ends={})) as run:
        assert held(run)["aircraft"]


def test_a_part_of_a_snapshot_is_not_shown_as_the_states_of_the_flow(saved: Path, tmp_path: Path) -> None:
    urls = stores(f"sqlite://{tmp_path}/part.db")
    interrupted(saved, urls, 3)
    with pytest.raises(RunRefusedError, match="being restored"):
        list(states(FLOW, "carrier", urls))
    world = InMemory(FLOW)
    world.stores = urls
    place = world.send(b"N1", b"{}")
    with pytest.raises(RunRefusedError, match="being restored"):
        world.explain(place)
    restore(FLOW, saved, stores=urls)
    assert [view.key for view in states(FLOW, "carrier", urls)] == [b"AA", b"UA"]


def test_of_two_restores_at_once_the_older_one_is_fenced(saved: Path) -> None:
    urls, done = apart(), list[str]()

    class Twice(Injector):
        def effect(self, point, action):  # type: ignore[no-untyped-def]
            if point == "restore" and not done:
                done.append(point)
                with faults.use(Injector()):
                    restore(FLOW, saved, stores=urls)
            return super().effect(point, action)

    with faults.use(Twice()), pytest.raises(Fenced):
        restore(FLOW, saved, stores=urls)
    with closing(MemoryRunner(FLOW, urls, ends={})) as run:
        assert held(run)["aircraft"]


def test_a_file_that_changes_while_it_is_restored_is_noticed(tmp_path: Path) -> None:
    source, file = stores(fresh_store()), tmp_path / "many"
    with closing(ran(source, [leg(n, f"N{n}", carrier=f"C{n}", minutes=1) for n in range(3_000)])):
        snapshot(FLOW, file, stores=source)

    class Truncating(Injector):
        def effect(self, point, action):  # type: ignore[no-untyped-def]
            if point == "restore":
                os.truncate(file, 20_000)
            return super().effect(point, action)

    urls, whole = apart(), file.read_bytes()
    assert len(whole) > 40_000
    with faults.use(Truncating()), pytest.raises(RunRefusedError, match="was changed while it was restored"):
        restore(FLOW, file, stores=urls)
    file.write_bytes(whole)
    assert restore(FLOW, file, stores=urls).states == {"aircraft": 3_000, "carrier": 3_000}


def test_the_command_does_not_restore_into_its_own_memory(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("restore", "tests.support.pure_flow:flow", "--from", str(saved), "--store", fresh_store())
    assert headwater(monkeypatch, *words) == Exit.USAGE
    assert "the store of stage aircraft is in the memory of one process" in capsys.readouterr().err

"""A snapshot is a flow's states of one batch; restored into empty stores, the flow continues exactly."""

import itertools
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import Flow
from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import TopicPartition
from jobs.backup import restore, snapshot
from jobs.cli.errors import Exit
from jobs.environment import UsageError
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.errors import Corrupt, Transient
from persistence.memory import open_store as memory
from persistence.names import FlowRef
from persistence.protocol import Stored
from persistence.snapshot_file import SnapshotReader
from tests.support.cli import run as headwater
from tests.support.pure import FLEET, bare, batch, fleet, fresh_store, leg

FLOW = fleet()
KINDS = ["sqlite", "lmdb", "memory"]
_names = itertools.count()


class Crash(BaseException):
    """The process dies."""


def crash() -> Any:
    raise Crash


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "fleet.snapshot"


def store(tmp_path: Path, kind: str) -> str:
    return fresh_store() if kind == "memory" else f"{kind}://{tmp_path}/{kind}-{next(_names)}"


def stores(url: str, flow: Flow[Any] = FLOW) -> dict[str, str]:
    return bind(flow, {}, url)


def ran(urls: dict[str, str], *parts: list[Record], flow: Flow[Any] = FLOW, **options: Any) -> MemoryRunner:
    """A run that read these batches and ended cleanly."""
    run = MemoryRunner(flow, urls, ends={}, **options)
    for part in parts:
        run.process(part)
    run.run.finish()
    return run


def held(run: MemoryRunner) -> dict[str, Any]:
    """What the states of every stage contain, histories and holes included, whatever store has them."""
    return {
        stage.name: {key: (one.fold, one.histories, one.time_us) for key, one in run.states(stage.name).items()}
        for stage in run.flow.stages
    }


def test_an_interrupted_restore_is_not_continued_with_another_snapshot(tmp_path: Path, file: Path) -> None:
    urls = stores(fresh_store())
    ran(urls, batch(1, 2))
    snapshot(FLOW, file, stores=urls)
    ran(urls, batch(3))
    snapshot(FLOW, tmp_path / "later", stores=urls)
    target = stores(fresh_store())
    with faults.use(Injector([Fault("restore", FaultOutcome.ERROR, 3)])), pytest.raises(Transient):
        restore(FLOW, file, stores=target)
    with pytest.raises(RunRefusedError, match="another snapshot"):
        restore(FLOW, tmp_path / "later", stores=target)


def test_a_snapshot_that_dies_leaves_no_file_and_an_earlier_one_as_it_was(tmp_path: Path, file: Path) -> None:
    urls = stores(fresh_store())
    ran(urls, batch(1, 2))
    snapshot(FLOW, file, stores=urls)
    before = file.read_bytes()
    ran(urls, batch(3))
    with faults.use(Injector([Fault("snapshot", FaultOutcome.BEFORE)], crash)), pytest.raises(Crash):
        snapshot(FLOW, file, stores=urls, replace=True)
    assert file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [file]
    snapshot(FLOW, file, stores=urls, replace=True)
    assert file.read_bytes() != before


def test_a_run_at_work_a_crashed_one_and_a_half_written_batch_are_refused(file: Path) -> None:
    urls = {"aircraft": fresh_store(), "carrier": fresh_store()}
    run = MemoryRunner(FLOW, urls, ends={})
    run.process(batch(1, 2))
    with pytest.raises(RunRefusedError, match="a run is at work"):
        snapshot(FLOW, file, stores=urls)
    with faults.use(Injector([Fault.parse("persist:aircraft.error")])), pytest.raises(Transient):
        run.process(batch(3))
    run.close()
    with pytest.raises(RunRefusedError, match="--until-caught-up"):
        snapshot(FLOW, file, stores=urls)
    again = MemoryRunner(FLOW, urls, ends={TopicPartition("legs", 0): 4})
    with pytest.raises(
        RunRefusedError, match="a run is at work"
    ):  # it has not read what the crashed one may have folded
        snapshot(FLOW, file, stores=urls)
    again.process(batch(3))
    again.close()
    snapshot(FLOW, file, stores=urls)
    assert file.exists()


def test_a_flow_that_has_read_nothing_yet_is_saved(file: Path) -> None:
    urls = stores(fresh_store())
    MemoryRunner(FLOW, urls).close()
    saved = snapshot(FLOW, file, stores=urls)
    assert (saved.states, saved.positions) == ({"aircraft": 0, "carrier": 0}, {})


def test_stores_without_the_flow_and_a_changed_definition_are_refused(file: Path) -> None:
    urls = stores(fresh_store())
    with pytest.raises(RunRefusedError, match="contain nothing of it"):
        snapshot(FLOW, file, stores=urls)
    ran(urls, batch(1, 2))
    other = Flow("fleet").source(bare()).aggregate("aircraft", "tail", FLEET).aggregate("carrier", "carrier", FLEET)
    with pytest.raises(DefinitionChangedError):
        snapshot(other, file, stores=urls)
    snapshot(FLOW, file, stores=urls)
    with pytest.raises(DefinitionChangedError, match="with the code that made it"):
        restore(other, file, stores=stores(fresh_store(), other))
    renamed = Flow("ships").source(bare()).aggregate("aircraft", "tail", FLEET)
    with pytest.raises(RunRefusedError, match="of flow fleet"):
        restore(renamed, file, stores=stores(fresh_store(), renamed))
    with pytest.raises(RunRefusedError, match="of generation 1"):
        restore(FLOW, file, stores=stores(fresh_store()), generation=2)
    with pytest.raises(FlowError, match="snapshot-versions"):
        restore(FLOW, file, stores=stores(fresh_store()), accept=["all"])


def test_a_store_with_states_of_the_flow_is_refused_and_stays_as_it_is(file: Path) -> None:
    urls = stores(fresh_store())
    live = ran(urls, batch(1, 2))
    snapshot(FLOW, file, stores=urls)
    before = held(live)
    with pytest.raises(RunRefusedError, match="contains states"):
        restore(FLOW, file, stores=urls)
    live.process(batch(3))  # its epoch is still the installed one
    assert held(live) != before
    crashed = stores(fresh_store())
    with faults.use(Injector([Fault.parse("manifest.error")])), pytest.raises(Transient):
        MemoryRunner(FLOW, crashed).process(batch(1))
    with pytest.raises(RunRefusedError, match="contains states"):
        restore(FLOW, file, stores=crashed)


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-9], lambda whole: whole[:60] + b"x" + whole[61:], lambda _: b""]
)
def test_a_damaged_file_is_refused_and_nothing_is_written(damage: Any, file: Path) -> None:
    urls, target = stores(fresh_store()), stores(fresh_store())
    ran(urls, batch(1, 2))
    snapshot(FLOW, file, stores=urls)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(RunRefusedError, match="nothing was written"):
        restore(FLOW, file, stores=target)
    assert memory(target["aircraft"]).installed_epoch(FlowRef("fleet")) == 0


def test_a_damaged_state_is_not_saved(file: Path) -> None:
    urls = stores(fresh_store())
    ran(urls, batch(1, 2))
    states = memory(urls["carrier"])._stages[FlowRef("fleet").stage("carrier")]
    key, stored = next(iter(states.items()))
    states[key] = Stored(stored.version, stored.epoch, stored.batch, stored.value.replace(b"n", b"m", 1))
    with pytest.raises(Corrupt):
        snapshot(FLOW, file, stores=urls)
    assert not file.exists()


def test_a_flow_that_publishes_its_states_is_restored_only_if_that_is_accepted(file: Path) -> None:
    flow = Flow("fleet").source(bare()).aggregate("aircraft", "tail", FLEET).publish_states("aircraft.states")
    urls, target = stores(fresh_store(), flow), stores(fresh_store(), flow)
    ran(urls, batch(1, 2), batch(4), flow=flow)
    snapshot(flow, file, stores=urls)
    with pytest.raises(RunRefusedError, match="--accept snapshot-versions"):
        restore(flow, file, stores=target)
    assert restore(flow, file, stores=target, accept=["snapshot-versions"]).states == {"aircraft": 2}


def test_an_older_run_is_fenced_by_the_restore(file: Path) -> None:
    urls, target = stores(fresh_store()), stores(fresh_store())
    ran(urls, batch(1, 2))
    snapshot(FLOW, file, stores=urls)
    with closing(
        begin(Flow("fleet").source(bare()).aggregate("aircraft", "tail", FLEET), {"aircraft": target["aircraft"]})
    ):
        pass
    with pytest.raises(RunRefusedError, match="contains states"):
        restore(FLOW, file, stores=target)


def test_the_commands_save_and_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flow = "tests.support.pure_flow:flow"
    ran(stores(f"sqlite://{tmp_path}/a.db"), batch(1, 2, 3)).close()
    words = ("snapshot", flow, "--store", f"sqlite://{tmp_path}/a.db", "--to", "s", "--json")
    assert headwater(monkeypatch, *words) == Exit.DONE
    saved = json.loads(capsys.readouterr().out)
    assert (saved["states"], saved["positions"]) == ({"aircraft": 3, "carrier": 2}, {"legs": {"0": 4}})
    assert headwater(monkeypatch, *words) == Exit.USAGE
    assert "--replace" in capsys.readouterr().err
    assert headwater(monkeypatch, *words, "--replace") == Exit.DONE
    back = ("restore", flow, "--store", f"lmdb://{tmp_path}/b", "--from", "s")
    assert headwater(monkeypatch, *back) == Exit.DONE
    out, err = capsys.readouterr()
    assert "aircraft" in out
    assert "the next run resumes after batch 1" in err
    assert headwater(monkeypatch, *back, "--json") == Exit.REFUSED
    assert "contains states" in json.loads(capsys.readouterr().out)["refused"]
    assert headwater(monkeypatch, "restore", flow, "--store", "lmdb://c", "--from", "none") == Exit.USAGE


def test_a_file_that_cannot_be_written_is_a_wrong_usage(tmp_path: Path) -> None:
    urls = stores(fresh_store())
    ran(urls, batch(1, 2))
    with pytest.raises(UsageError, match="No such file"):
        snapshot(FLOW, tmp_path / "nowhere" / "s", stores=urls)


@pytest.mark.parametrize("there", [Path.mkdir, os.mkfifo])
def test_what_is_not_a_regular_file_is_neither_replaced_nor_read(there: Any, file: Path) -> None:
    urls = stores(fresh_store())
    ran(urls, batch(1, 2))
    there(file)
    with pytest.raises(UsageError, match="not a regular file"):
        snapshot(FLOW, file, stores=urls, replace=True)
    with pytest.raises(UsageError, match="not a regular file"):
        restore(FLOW, file, stores=stores(fresh_store()))


class Long:
    """A state of a megabyte."""

    def zero(self) -> str:
        return "x" * (1 << 20)

    def fold(self, state: str, element: Element[Any]) -> str:
        return state


def test_large_states_are_saved_and_read_in_small_parts(file: Path) -> None:
    flow = Flow("fleet").source(bare()).aggregate("aircraft", "tail", Long())
    urls, target = stores(fresh_store(), flow), stores(fresh_store(), flow)
    with closing(ran(urls, [leg(n, f"N{n}") for n in range(9)], flow=flow)) as live:
        snapshot(flow, file, stores=urls)
        with file.open("rb") as opened:
            parts = [part for _, part in SnapshotReader(opened).states()]
        assert (len(parts), max(map(len, parts))) == (5, 2)
        restore(flow, file, stores=target)
        with closing(MemoryRunner(flow, target, ends={})) as copy:
            assert held(copy) == held(live)

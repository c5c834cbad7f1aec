"""States of a real run, as `headwater inspect` shows them."""

import json
from pathlib import Path

import pytest

from aggregations.definition.aggregates import count, mean
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs.cli.errors import Exit
from jobs.views import states
from tests.support.cli import run as headwater

flow = (
    Flow("visits")
    .source(Topic("visits", payload=Json({"page": str, "ms": int}), envelope=False))
    .aggregate("page", key="page", fold=Fields(visits=count(), ms=mean("ms")), co_partitioned=False)
)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with the states of six visits of three pages."""
    url = f"sqlite://{tmp_path}/states.db"
    runner = MemoryRunner(flow, bind(flow, {}, url))
    for offset, (page, ms) in enumerate([("a", 10), ("b", 5), ("a", 20), ("c", 1), ("a", 31), ("b", 6)]):
        value = json.dumps({"page": page, "ms": ms}).encode()
        runner.process([Record("visits", 0, offset, b"visitor", value)])
    runner.close()
    return url


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return headwater(monkeypatch, "inspect", "visits:flow", *arguments)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """This very flow is what MODULE:FLOW names."""
    monkeypatch.setattr("jobs.loading.load_flow", lambda reference: flow)


def test_json_has_key_state_version_lanes_and_holes(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--store", store, "--json", "--key", "a") == 0
    [view] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert view.pop("definition") == flow.stages[0].definition
    assert isinstance(view.pop("written_by_ms"), int)
    assert view == {
        "key": "a",
        "state": {"visits": 3, "ms": 61 / 3},
        "version": 3,
        "epoch": 1,
        "batch": 5,
        "lanes": {"visits:0#": {"held": [[0], [2], [4]], "floor": None, "used": 5}},
        "holes": {},
    }


def test_without_a_key_every_state_is_a_line(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--store", store, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["key"], line["state"]["visits"]) for line in lines] == [("a", 3), ("b", 2), ("c", 1)]


def test_people_get_a_table_and_are_told_when_it_is_cut(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--store", store, "--limit", "2") == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["key", "visits", "ms", "version", "lanes"]
    assert lines[2:] == [["a", "3", "20.33", "3", "1"], ["b", "2", "5.50", "2", "1"]]
    assert "the first 2" in err


def test_a_key_without_a_state_is_refused(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--store", store, "--json", "--key", "a", "--key", "z") == Exit.REFUSED
    out, err = capsys.readouterr()
    said = "stage page has no state for 1 of 2 keys"
    assert [json.loads(line).get("refused") for line in out.splitlines()] == [None, said]
    assert err == f"stage page, generation 1: {store} (--store)\nheadwater: {said}\n"


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_where_no_state_is_the_exit_code_says_so_and_the_three_ways_to_name_a_store(
    more: tuple[str, ...], store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--store", store, "--generation", "2", *more) == Exit.REFUSED
    out, err = capsys.readouterr()
    assert [*json.loads(out)] == ["refused"] if more else out == ""
    assert err.startswith(f"stage page, generation 2: {store} (--store)\n")
    assert "--store, set HEADWATER_STORE, or write it into headwater.toml" in err


def test_a_store_that_is_not_there_is_read_as_empty_and_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWATER_STORE", raising=False)
    assert run(monkeypatch) == Exit.REFUSED
    assert f"lmdb://{tmp_path}/.headwater/states (default)" in capsys.readouterr().err
    assert run(monkeypatch, "--store", f"sqlite://{tmp_path}/no/such/x.db", "--key", "a") == Exit.REFUSED
    assert list(tmp_path.iterdir()) == []


def test_the_store_of_headwater_toml_is_read_without_being_named_again(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWATER_STORE", raising=False)
    (tmp_path / "headwater.toml").write_text(f'[flows.visits]\nstore = "{store}"\n')
    assert run(monkeypatch, "--json", "--key", "b") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["state"]["visits"] == 2
    assert err == f"stage page, generation 1: {store} (headwater.toml)\n"


def test_a_key_that_is_no_text_is_shown_in_base64(store: str) -> None:
    runner = MemoryRunner(
        Flow("raw").source(Topic("raw", envelope=False)).aggregate("k", key=lambda e: b"\xff", fold=Fields(n=count())),
        {"k": store},
    )
    runner.process([Record("raw", 0, 0, None, b"v")])
    [view] = states(runner.flow, "k", {"k": store})
    assert view.as_json()["key_base64"] == "/w=="
    runner.close()

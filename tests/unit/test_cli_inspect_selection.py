"""Which states `headwater inspect` shows, and in which form."""

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from aggregations.definition.aggregates import count, mean
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from tests.support.cli import run as headwater

PAGES = ["/a", "/b/1", "/b/2", "/b/3", "/c", "base64:x"]

flow = (
    Flow("visits")
    .source(Topic("visits", payload=Json({"page": str, "ms": int}), envelope=False))
    .aggregate("page", key="page", fold=Fields(visits=count(), ms=mean("ms")), co_partitioned=False)
)


@pytest.fixture(params=["sqlite", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store with the states of six pages: the n-th has n visits, each folded in a batch of its own."""
    url = f"{request.param}://{tmp_path}/states"
    runner = MemoryRunner(flow, bind(flow, {}, url))
    visits = [page for at, page in enumerate(PAGES, start=1) for _ in range(at)]
    for offset, page in enumerate(visits):
        runner.process([Record("visits", 0, offset, b"v", json.dumps({"page": page, "ms": offset}).encode())])
    runner.close()
    return url


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """This very flow is what MODULE:FLOW names."""
    monkeypatch.setattr("jobs.loading.load_flow", lambda reference: flow)


class Inspect:
    """The command on one store."""

    def __init__(self, store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._store, self._monkeypatch, self._capsys = store, monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        code = headwater(self._monkeypatch, "inspect", "visits:flow", "--store", self._store, *arguments)
        return (code, *self._capsys.readouterr())

    def keys(self, *arguments: str) -> list[str]:
        """The keys that are shown as JSON."""
        code, out, _ = self("--json", *arguments)
        assert code == 0
        return [json.loads(line)["key"] for line in out.splitlines()]


@pytest.fixture
def inspect(store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inspect:
    return Inspect(store, monkeypatch, capsys)


def test_a_prefix_selects_keys_that_begin_with_it(inspect: Inspect) -> None:
    assert inspect.keys("--prefix", "/b/") == ["/b/1", "/b/2", "/b/3"]
    assert inspect.keys("--prefix", "base64:L2I=") == ["/b/1", "/b/2", "/b/3"]


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        ("visits >= 4", ["/b/3", "/c", "base64:x"]),
        ("_version = 2 OR _key LIKE '%c'", ["/b/1", "/c"]),
        ("ms BETWEEN 1 AND 5 AND _lanes = 1 AND _holes = 0", ["/b/1", "/b/2"]),
        ("_batch < 2", ["/a"]),
        ("TRUE", PAGES),
    ],
)
def test_a_condition_selects_by_fields_and_by_what_the_store_knows(
    inspect: Inspect, where: str, keys: list[str]
) -> None:
    assert inspect.keys("--where", where) == keys


def test_pages_of_any_size_together_show_every_state_once_and_in_order(inspect: Inspect) -> None:
    for size in (1, 2, 4):
        shown, after = [], []
        while page := inspect.keys("--limit", str(size), *after):
            shown += page
            after = ["--after", page[-1] if page[-1] != "base64:x" else "base64:YmFzZTY0Ong="]
        assert shown == PAGES


def test_a_table_names_the_option_of_the_next_page_and_the_last_page_none(inspect: Inspect) -> None:
    code, out, err = inspect("--limit", "2")
    assert (code, [line.split()[0] for line in out.splitlines()[2:]]) == (0, ["/a", "/b/1"])
    assert "... the first 2; the next page: --after /b/1\n" in err
    code, out, err = inspect("--limit", "4", "--after", "/b/1")
    assert (code, [line.split()[0] for line in out.splitlines()[2:]]) == (
        0,
        ["/b/2", "/b/3", "/c", "base64:YmFzZTY0Ong="],
    )
    assert "next page" not in err


def test_selections_are_combined(inspect: Inspect) -> None:
    assert inspect.keys("--prefix", "/b", "--after", "/b/1", "--where", "visits < 9", "--limit", "1") == ["/b/2"]


def test_where_nothing_matches_the_exit_code_is_zero_but_not_where_the_store_is_empty(inspect: Inspect) -> None:
    code, out, err = inspect("--where", "visits > 99", "--prefix", "/")
    assert (code, out) == (0, "")
    assert err.endswith("no state matches --prefix and --where\n")
    assert inspect("--where", "visits > 99", "--generation", "2")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--where", "visits >"], "unable to parse 'visits >' as Expr"),
        (["--where", "hits > 1"], 'unable to find column "hits"; write a condition on _key, visits, ms, '),
        (["--where", "visits + 1"], "visits + 1 is Int64, neither true nor false"),
        (["--where", "sum(visits) > 1"], "it needs other states than one"),
        (["--where", "visits > (SELECT 1)"], "it needs other states than one"),
        (["--where", "read_csv('/etc/passwd') > 1"], "unsupported function 'read_csv'"),
        (["--where", "CAST(_key AS INT) > 1"], "cannot be evaluated for a state"),
        (["--where", ""], "it is empty"),
        (["--key", "a", "--where", "TRUE"], "--key and --where: give one of them"),
        (["--after", "base64:?"], "is not valid base64"),
        (["--format", "parquet"], "give --output FILE"),
        (["--output", "x"], "give --format json or --format parquet"),
        (["--json", "--format", "table"], "--json and --format table: give one of them"),
        (["--format", "csv"], "'csv' is not one of 'table', 'json', 'parquet'"),
    ],
)
def test_bad_input_ends_with_two_and_names_the_remedy(inspect: Inspect, arguments: list[str], why: str) -> None:
    code, out, err = inspect(*arguments)
    assert (code, [line for line in out.splitlines() if "refused" not in line]) == (2, [])
    assert why in err
    assert len([line for line in err.splitlines() if line.startswith("headwater: ")]) <= 1
    assert "/a" not in err, "no data of a state"


def test_json_lines_in_a_file_are_those_of_standard_output(inspect: Inspect, tmp_path: Path) -> None:
    _, shown, _ = inspect("--json")
    assert inspect("--format", "json", "--output", f"{tmp_path}/states.jsonl")[:2] == (0, "")
    assert (tmp_path / "states.jsonl").read_text() == shown


def test_parquet_has_typed_fields_and_the_histories(inspect: Inspect, tmp_path: Path) -> None:
    file = tmp_path / "states.parquet"
    assert inspect("--format", "parquet", "--output", str(file), "--where", "visits = 2")[:2] == (0, "")
    frame = pl.read_parquet(file)
    assert frame.select("_key", "visits", "ms", "_version", "_holes").rows() == [("/b/1", 2, 1.5, 2, 0)]
    assert frame["_histories"].to_list() == [[{"lane": "visits:0#", "held": ["[1]", "[2]"], "floor": None, "used": 3}]]
    assert frame["_pending"].to_list() == [[]]


def test_parquet_without_a_row_has_the_columns(inspect: Inspect, tmp_path: Path) -> None:
    file = tmp_path / "states.parquet"
    assert inspect("--format", "parquet", "--output", str(file), "--where", "visits = 99")[0] == 0
    assert pl.read_parquet(file).schema["visits"] == pl.Int64


def test_a_file_is_replaced_only_by_a_complete_one(inspect: Inspect, tmp_path: Path) -> None:
    file = tmp_path / "states.parquet"
    file.write_text("before")
    where = "CAST(TRY_CAST(SUBSTR(_key, 4, 1) AS INT) AS INT) > 0 AND CAST(_key AS INT) > 0"
    assert inspect("--format", "parquet", "--output", str(file), "--where", where)[0] == 2
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if ".part" in path.name] == []
    code, _, said = inspect("--format", "json", "--output", f"{tmp_path}/no/such/file")
    assert (code, "cannot be written: No such file or directory; choose another file" in said) == (2, True)


def test_a_pipe_is_written_and_not_replaced(inspect: Inspect, tmp_path: Path) -> None:
    inspect.keys()  # the store is open, and its modules imported
    pipe = tmp_path / "pipe"
    subprocess.run(["mkfifo", pipe], check=True)
    reader = subprocess.Popen(
        [sys.executable, "-c", f"print(len(open({str(pipe)!r}).readlines()))"], stdout=subprocess.PIPE
    )
    assert inspect("--format", "json", "--output", str(pipe))[0] == 0
    assert reader.communicate()[0] == b"6\n"
    assert pipe.is_fifo()

"""`headwater inspect` and the table of a stage with sessions: a row for each session."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from jobs.views import states
from tests.support.cli import run as headwater

SIX = 1_795_500_000_000
"""2026-11-24T06:00:00Z."""
VISITS = Flow("visits").source(Topic("visits", payload=Json({"page": str}), envelope=False))
flow = VISITS.aggregate("page", "page", Fields(n=count()), co_partitioned=False, window=session("5m", lateness="1d"))
MINUTES = [("a", 0), ("b", 5), ("a", 2), ("a", 30), ("c", 63), ("a!", 1), ("a", 90)]


def stored(url: str) -> str:
    """A store with the sessions of four pages."""
    runner = MemoryRunner(flow, bind(flow, {}, url))
    runner.process(
        [
            Record("visits", 0, offset, b"visitor", json.dumps({"page": page}).encode(), SIX + minute * 60_000)
            for offset, (page, minute) in enumerate(MINUTES)
        ]
    )
    runner.close()
    return url


@pytest.fixture
def store(tmp_path: Path) -> str:
    return stored(f"sqlite://{tmp_path}/states.db")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("jobs.loading.load_flow", lambda reference: flow)
    return headwater(monkeypatch, "inspect", "visits:flow", *arguments)


ALL = ["a@06:00-06:02", "a@06:30-06:30", "a@07:30-07:30", "a!@06:01-06:01", "b@06:05-06:05", "c@07:03-07:03"]


@pytest.mark.parametrize(
    ("options", "code", "wanted"),
    [
        ([], 0, ALL),
        (["--key", "a"], 0, ALL[:3]),
        (["--key", "a", "--window", "2026-11-24T06:30:00Z"], 0, ALL[1:2]),
        (["--window", "2026-11-24T07:03:00Z"], 0, ALL[5:]),
        (["--window", "2026-11-24T06:29:00Z", "--key", "a"], 3, []),
        (["--prefix", "a"], 0, ALL[:4]),
        (["--limit", "2"], 0, ALL[:2]),
        (["--limit", "3", "--after", "a@2026-11-24T06:30:00Z/2026-11-24T06:30:00Z"], 0, ALL[2:5]),
        (["--after", "a!"], 0, ALL[4:]),
        (["--where", "n > 1"], 0, ALL[:1]),
        (["--where", "_window_end > _window_start"], 0, ALL[:1]),
        (["--key", "z"], 3, []),
    ],
)
def test_sessions_are_found_by_key_by_start_and_page_by_page(
    options: list[str],
    code: int,
    wanted: list[str],
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "--store", store, "--json", *options) == code
    lines = [line for text in capsys.readouterr().out.splitlines() if "refused" not in (line := json.loads(text))]
    assert [
        f"{line['key'].split('@')[0]}@{line['window_start'][11:16]}-{line['window_end'][11:16]}" for line in lines
    ] == wanted
    assert all(line["key"].endswith(f"@{line['window_start']}/{line['window_end']}") for line in lines)


def test_the_next_page_of_a_table_begins_after_the_last_session_of_the_page(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--store", store, "--limit", "2") == 0
    assert "--after a@2026-11-24T06:30:00Z/2026-11-24T06:30:00Z" in capsys.readouterr().err


def test_a_store_without_an_order_gives_the_lowest_sessions(tmp_path: Path) -> None:
    lmdb = stored(f"lmdb://{tmp_path}/states")
    found = states(flow, "page", bind(flow, {}, lmdb), limit=2)
    assert [view.window.start.minute for view in found if view.window] == [0, 30]


def test_the_table_has_a_row_for_each_session_with_its_first_and_last_time(store: str) -> None:
    frame = states(flow, "page", bind(flow, {}, store), keys=[b"a"]).frame()
    assert frame.select("n", "_window_start", "_window_end").rows() == [
        (2, _minute(0), _minute(2)),
        (1, _minute(30), _minute(30)),
        (1, _minute(90), _minute(90)),
    ]
    assert frame.get_column("_version").to_list() == [1, 1, 1]


def _minute(minute: int) -> datetime:
    return datetime.fromtimestamp(SIX / 1000 + minute * 60, UTC)

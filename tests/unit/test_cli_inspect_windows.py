"""`headwater inspect` of a stage with windows."""

import json
from pathlib import Path

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from tests.support.cli import run as headwater

SIX = 1_795_500_000_000
"""2026-11-24T06:00:00Z."""
VISITS = Flow("visits").source(Topic("visits", payload=Json({"page": str}), envelope=False))
flow = VISITS.aggregate("page", "page", Fields(n=count()), co_partitioned=False, window=tumbling("1h", lateness="1d"))


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with the states of three pages in two hours."""
    url = f"sqlite://{tmp_path}/states.db"
    runner = MemoryRunner(flow, bind(flow, {}, url))
    runner.process(
        [
            Record("visits", 0, offset, b"visitor", json.dumps({"page": page}).encode(), SIX + minute * 60_000)
            for offset, (page, minute) in enumerate([("a", 0), ("b", 5), ("a", 61), ("a", 62), ("c", 63)])
        ]
    )
    runner.close()
    return url


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("jobs.loading.load_flow", lambda reference: flow)
    return headwater(monkeypatch, "inspect", "visits:flow", *arguments)


@pytest.mark.parametrize(
    ("options", "code", "wanted"),
    [
        ([], 0, ["a@6", "a@7", "b@6", "c@7"]),
        (["--key", "a"], 0, ["a@6", "a@7"]),
        (["--window", "2026-11-24T06:00:00Z"], 0, ["a@6", "b@6"]),
        (["--window", "2026-11-24T08:00:00+01:00", "--key", "c", "--key", "a"], 0, ["a@7", "c@7"]),
        (["--window", "2026-11-24T06:00:00Z", "--key", "c", "--key", "a"], 3, ["a@6"]),
        (["--key", "z"], 3, []),
    ],
)
def test_states_are_found_by_key_and_by_window(
    options: list[str],
    code: int,
    wanted: list[str],
    store: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "--store", store, "--json", *options) == code
    lines = [line for text in capsys.readouterr().out.splitlines() if "refused" not in (line := json.loads(text))]
    hours = {"2026-11-24T06:00:00Z": "6", "2026-11-24T07:00:00Z": "7"}
    assert sorted(f"{line['key'].split('@')[0]}@{hours[line['window_start']]}" for line in lines) == wanted
    assert all(line["key"].endswith(f"@{line['window_start']}") for line in lines)


@pytest.mark.parametrize("time", ["2026-11-24T06:30:00Z", "2026-11-24T06:00:00", "yesterday"])
def test_a_time_at_which_no_window_starts_is_refused_with_the_remedy(
    time: str, store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--store", store, "--window", time) == 2
    assert "starts at multiples of 1h" in (err := capsys.readouterr().err) or "2026-11-24T06:00:00Z" in err

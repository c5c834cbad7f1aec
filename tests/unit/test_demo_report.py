import json
from collections import Counter
from pathlib import Path

import pytest

from jobs.demo import home, play, report
from jobs.demo.play import Result
from jobs.environment import UsageError
from tests.support.cli import run as headwater

CARRIER = {"legs": 10, "air_minutes": 100, "dep_delay": 5, "arr_delay": -7, "worst_delay": 33, "cancelled": 1}


def result(*mismatches: str) -> Result:
    return Result(
        flights=100,
        nonsense=19,
        messages=250,
        resent=40,
        crashes=["republish:commit.before@1", "persist:aircraft.before@3"],
        records=250,
        verdicts={
            "aircraft": Counter(accepted=190, duplicate=40, below_floor=2),
            "carrier": Counter(accepted=180, below_floor=10),
        },
        dead_letters=Counter(empty=2),
        keys={"aircraft": 80, "carrier": 1},
        mismatches=list(mismatches),
        carriers={"UA": CARRIER},
        naive={"UA": {**CARRIER, "legs": 12}},
        phases={"produce": 1.5, "check": 2.0},
    )


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Result, *arguments: str) -> int:
    monkeypatch.setattr(play, "play", lambda *given, **named: found)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return headwater(monkeypatch, "demo", *arguments)


def test_json_ends_with_one_object_of_all_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, result(), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    expected = {
        "flights": 100,
        "messages": 250,
        "resent": 40,
        "crashes": 2,
        "mismatches": 0,
        "exact": True,
        "seconds": 3.5,
    }
    assert expected.items() <= told.items()
    assert told["dropped"] == {"duplicate": 40, "below_floor": 12}
    assert told["dead_letters"] == {"empty": 2}


def test_a_number_that_is_not_exact_ends_in_one_and_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, result("carrier UA: legs 11 for 10")) == 1
    out = capsys.readouterr().out
    assert "carrier UA: legs 11 for 10" in out
    assert out.endswith("exact: no\n")
    assert run(monkeypatch, tmp_path, result("carrier UA: legs 11 for 10"), "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["exact"], told["mismatches"], told["differing"]) == (False, 1, ["carrier UA: legs 11 for 10"])


def test_people_see_carriers_beside_the_naive_count_and_what_was_dropped_and_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report.show(result())
    out = capsys.readouterr().out
    [carrier] = [line.split() for line in out.splitlines() if line.startswith("UA")]
    assert carrier == ["UA", "10", "12", "100", "100", "-7", "-7", "33", "1", "1"]
    rows = [line.split() for line in out.splitlines()]
    assert ["aircraft", "duplicate", "40"] in rows
    assert ["carrier", "below_floor", "10"] in rows
    assert out.endswith("exact: yes\n")


def test_the_directory_is_gone_at_the_end_unless_it_is_wanted_or_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with home.directory(keep=False) as gone:
        pass
    with home.directory(keep=True) as kept:
        pass
    with pytest.raises(ValueError, match="x"), home.directory(keep=False) as empty:
        raise ValueError("x")
    with pytest.raises(ValueError, match="x"), home.directory(keep=False) as needed:
        (needed / "job-1.log").touch()
        raise ValueError("x")
    with pytest.raises(KeyboardInterrupt), home.directory(keep=False) as stopped:
        raise KeyboardInterrupt
    assert [path.exists() for path in (gone, kept, empty, needed, stopped)] == [False, True, False, True, False]
    assert capsys.readouterr().err == f"logs and states: {kept}\nlogs and states: {needed}\n"


def test_a_store_of_one_s_own_gets_a_generation_without_states(tmp_path: Path) -> None:
    url, generation = home.prepared(f"sqlite://{tmp_path}/mine.db", tmp_path)
    assert url == f"sqlite://{tmp_path}/mine.db"
    assert generation > 1
    assert home.prepared(None, tmp_path) == (f"lmdb://{tmp_path}/states", 1)
    with pytest.raises(UsageError, match="can share"):
        home.prepared("memory://mine", tmp_path)

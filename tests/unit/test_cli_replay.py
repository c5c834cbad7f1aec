"""`headwater replay`: which function it calls, with which runner, and what it refuses and says."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from aggregations.local import run_local
from aggregations.spark import run_flow
from jobs.cli.errors import Exit
from persistence.pointer import Change
from tests.support.cli import run
from tests.support.command_table_replay import POINTER
from tests.support.commands import COMMANDS, Calls, plant, recorded_in

FORMS = ["apply", "swap", "rollback", "abandon", "mend"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    return recorded_in(tmp_path, monkeypatch)


def words(form: str) -> list[str]:
    return COMMANDS[f"headwater replay ({form})" if form else "headwater replay"].words.split()


@pytest.mark.parametrize("form", ["apply", "swap"])
def test_the_runner_is_spark_or_this_process(form: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    command = COMMANDS[f"headwater replay ({form})"]

    def callee(*_: Any, runner: Any, **__: Any) -> Any:
        given.append(runner)
        return command.result

    monkeypatch.setattr(command.callee, callee)
    assert run(monkeypatch, *words(form), "--runner", "local") == Exit.DONE
    assert run(monkeypatch, *words(form), "--master", "local[3]", "--conf", "spark.ui.port=4041") == Exit.DONE
    local, spark = given
    assert local is run_local
    assert spark.func is run_flow
    assert spark.keywords["master"] == "local[3]"
    assert spark.keywords["conf"]["spark.ui.port"] == "4041"


@pytest.mark.parametrize("form", FORMS)
def test_whatever_changes_something_needs_a_reason(
    form: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(calls, COMMANDS[f"headwater replay ({form})"], monkeypatch)
    given = " ".join(words(form)).replace("--reason fold", "").split()
    assert run(monkeypatch, *given) == Exit.USAGE
    assert f"--{'apply' if form == 'mend' else form}: give --reason" in capsys.readouterr().err
    assert calls.given == []


@pytest.mark.parametrize("number", ["0", "-1", "x", "1000000000"])
def test_a_generation_that_cannot_exist_is_not_dropped(
    number: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(calls, COMMANDS["headwater replay (drop)"], monkeypatch)
    assert run(monkeypatch, *" ".join(words("drop")).replace("--drop 1", f"--drop {number}").split()) == Exit.USAGE
    assert "Invalid value for '--drop'" in capsys.readouterr().err
    assert calls.given == []


@pytest.mark.parametrize(
    ("form", "option", "said"),
    [
        ("apply", "--swap", "--apply and --swap: give one of them"),
        ("", "--reason fold", "--reason is for --apply, --swap, --rollback, --abandon, --drop and --key; remove it"),
        ("apply", "--letters drop", "--letters is for --swap"),
        ("swap", "--letters maybe", "--letters maybe: give send or drop"),
        ("swap", "--redefine", "--redefine is for a plan and --apply"),
        ("apply", "--against jobs.demo.flow:flow", "--against is for a plan and --swap"),
        ("apply", "--sample 3", "--sample is for a plan, --swap and --key"),
        ("", "--take-over", "--take-over is for"),
        ("rollback", "--dead-letters dead", "--dead-letters is for"),
        ("abandon", "--max-records 7", "--max-records is for"),
        ("abandon", "--accept lost-records", "--accept is for"),
        ("", "--runner local", "--runner is for"),
        ("", "--master local[2]", "--master is for"),
        ("rollback", "--conf a=b", "--conf is for"),
        ("apply", "--runner local --master local[2]", "--master is an option of Spark"),
        ("", "--stage carrier", "--stage is for --key"),
        ("swap", "--work here", "--work is for --key"),
        ("", "--journal flights.journal", "--journal is for --key"),
        ("swap", "--key N1", "--swap and --key: give one of them"),
        ("", "--key N1", "--key: give --stage"),
        ("key", "--reason fold", "--key: --reason is for --apply"),
        ("mend", "--take-over", "--take-over is not for --key"),
        ("mend", "--runner local", "--runner is not for --key"),
        ("key", "--redefine", "--redefine is not for --key"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    form: str,
    option: str,
    said: str,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for one in ("", "key", *FORMS):
        plant(calls, COMMANDS[f"headwater replay ({one})" if one else "headwater replay"], monkeypatch)
    assert run(monkeypatch, *words(form), *option.split()) == Exit.USAGE
    assert said in capsys.readouterr().err
    assert calls.given == []


def test_what_was_changed_is_shown_with_who_and_why(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(calls, COMMANDS["headwater replay (rollback)"], monkeypatch)
    assert run(monkeypatch, *words("rollback")) == Exit.DONE
    said = capsys.readouterr().err
    assert "1970-01-01T00:00:00Z swap of generation 2 by ann@host: a corrected fold\ngeneration 2 is live" in said
    back = str(Change(0, "ann@host", "rollback", 1, "wrong"))
    assert back == "1970-01-01T00:00:00Z rollback to generation 1 by ann@host: wrong"
    assert run(monkeypatch, *words("rollback"), "--json") == Exit.DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["live"], told["previous"], told["changes"][0]["by"]) == (2, 1, POINTER.changes[0].by)


@pytest.mark.parametrize(("form", "code"), [("apply", Exit.DONE), ("swap", Exit.REFUSED)])
def test_a_swap_that_is_stopped_before_it_began_is_not_a_success(
    form: str, code: Exit, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(COMMANDS[f"headwater replay ({form})"].callee, stopped)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert run(monkeypatch, *words(form)) == code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ("stopped, and not swapped" in capsys.readouterr().err) == (form == "swap")


def test_what_is_mended_is_shown_and_what_is_not(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(calls, COMMANDS["headwater replay (key)"], monkeypatch)
    assert run(monkeypatch, *words("key")) == Exit.DONE
    said = capsys.readouterr()
    assert ["N1", "changed"] in [line.split() for line in said.out.splitlines()]
    assert "1 state to mend; nothing is written without --apply --reason TEXT\n" in said.err
    assert "not touched: carrier, whose states depend on this stage\n" in said.err
    plant(calls, COMMANDS["headwater replay (mend)"], monkeypatch)
    assert run(monkeypatch, *words("mend")) == Exit.DONE
    said = capsys.readouterr()
    assert "1 state of stage aircraft mended in generation 1\n2 messages with published states sent\n" in said.err
    assert (calls.given[-1]["apply"], calls.given[-1]["why"]) == (True, "fold")

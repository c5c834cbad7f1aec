"""The command line's surface: help for everything, one line and an exit code for every error."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from aggregations.errors import DefinitionChangedError, FlowError, RunRefusedError
from jobs.cli import app, main
from jobs.cli.errors import Exit, explain
from jobs.demo.children import DemoError
from jobs.environment import UsageError
from jobs.loading import LoadError
from jobs.stack import StackError
from jobs.stack.jars import JarsUnavailable
from jobs.stack.java import JavaUnavailable
from persistence.commit.faults import known_points
from persistence.errors import Conflict, Corrupt, Fenced, InvalidUrl, Terminal, Transient
from persistence.kafka import BrokerRefused, BrokerUnavailable, SettingsError
from tests.support.cli import run


def commands(command: Any, path: str = "headwater") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}")


EVERY = dict(commands(get_command(app)))
PARAMETERS = [
    (path, parameter) for path, command in EVERY.items() for parameter in command.params if parameter.name != "help"
]


@pytest.mark.parametrize("path", EVERY)
def test_every_command_says_what_it_does(path: str) -> None:
    assert len(EVERY[path].help or "") > 20


@pytest.mark.parametrize(("path", "parameter"), PARAMETERS, ids=[f"{path} {one.name}" for path, one in PARAMETERS])
def test_every_option_and_argument_says_what_it_is(path: str, parameter: Any) -> None:
    assert len(getattr(parameter, "help", "") or "") > 8


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FlowError("f"), Exit.USAGE),
        (LoadError("f"), Exit.USAGE),
        (UsageError("f"), Exit.USAGE),
        (SettingsError("f"), Exit.USAGE),
        (InvalidUrl("f"), Exit.USAGE),
        (RunRefusedError("f"), Exit.REFUSED),
        (DefinitionChangedError("f"), Exit.REFUSED),
        (BrokerUnavailable("f", "g"), Exit.FAILED),
        (BrokerRefused("f", "g"), Exit.FAILED),
        (Transient("f"), Exit.FAILED),
        (Terminal("f"), Exit.FAILED),
        (Corrupt("f"), Exit.FAILED),
        (Fenced("f"), Exit.FAILED),
        (Conflict((b"k",)), Exit.FAILED),
        (StackError("f"), Exit.FAILED),
        (JarsUnavailable("f"), Exit.FAILED),
        (JavaUnavailable("f"), Exit.FAILED),
        (DemoError("f"), Exit.FAILED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_every_error_of_ours_has_an_exit_code_and_its_own_words(error: Exception, code: Exit) -> None:
    assert explain(error) == (code, str(error))


def test_an_error_of_several_lines_becomes_one() -> None:
    assert explain(StackError("first\n  second"))[1] == "first second"


def test_an_unexpected_error_shows_its_place_and_never_its_text() -> None:
    try:
        raise ZeroDivisionError("the customer's number is 4711")
    except ZeroDivisionError as error:
        code, line = explain(error)
    assert code is Exit.FAILED
    assert "ZeroDivisionError at test_cli.py:" in line
    assert "4711" not in line


def test_an_error_is_one_line_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "describe", "no_such_module:flow") == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"headwater: there is no module no_such_module in {tmp_path} or on PYTHONPATH\n"


WITH_JSON = [path.split()[1:] for path, parameter in PARAMETERS if parameter.name == "json"]


@pytest.mark.parametrize("command", WITH_JSON, ids=" ".join)
def test_every_command_that_is_refused_says_so_as_json_too(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWATER_FAULT", "nowhere.after")
    assert run(monkeypatch, *command, "--json") == Exit.USAGE
    out, err = capsys.readouterr()
    reason = json.loads(out)["refused"]
    assert "unknown fault point 'nowhere'" in reason
    assert err == f"headwater: {reason}\n"
    assert run(monkeypatch, *command) == Exit.USAGE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("redrive", "Missing option '--from'"),
        ("run jobs.demo.flow:flow --nowhere", "No such option: --nowhere"),
        ("run jobs.demo.flow:flow --generation 0", "Invalid value for '--generation'"),
        ("stack sideways", "No such command 'sideways'"),
    ],
)
def test_options_that_cannot_be_read_are_refused_as_json_too(
    words: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words.split(), "--json") == Exit.USAGE
    out, err = capsys.readouterr()
    assert json.loads(out)["refused"].startswith(reason)
    assert f"Error: {reason}" in err
    assert err.startswith("Usage: headwater ")
    assert run(monkeypatch, *words.split()) == Exit.USAGE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("group", [name for name, command in EVERY.items() if hasattr(command, "commands")])
def test_a_list_of_commands_cuts_none_of_their_descriptions(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, *group.split()[1:], "--help") == Exit.DONE
    commands = capsys.readouterr().out.partition("Commands:")[2].partition("Exit codes")[0]
    assert [line for line in commands.splitlines() if line.strip() and not line.rstrip().endswith(".")] == []
    assert "..." not in commands


def test_a_run_that_is_unsafe_is_refused_as_json_too_and_a_failure_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: list[Exception] = [RunRefusedError("the topic is compacted"), BrokerUnavailable("no answer", "start it")]

    def fails(*_: object, **__: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr("aggregations.spark.checks.plan_flow", fails)
    plan = ("plan", "jobs.demo.flow:flow", "--bootstrap", "b:1", "--json")
    assert run(monkeypatch, *plan) == Exit.REFUSED
    assert json.loads(capsys.readouterr().out) == {"refused": "the topic is compacted"}
    assert run(monkeypatch, *plan) == Exit.FAILED
    assert capsys.readouterr().out == ""


def test_json_behind_a_double_dash_is_for_another_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("submit-command", "jobs.demo.flow:flow", "--deploy-mode", "nowhere", "--", "--json")
    assert run(monkeypatch, *arguments) == Exit.USAGE
    assert capsys.readouterr().out == ""


def test_a_demo_that_is_stopped_inside_a_c_library_s_call_ends_with_the_signal_s_code_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(count: int, store: str, home: Path, **_: object) -> None:
        (home / "stack").mkdir()
        try:
            signal.raise_signal(signal.SIGTERM)
        except SystemExit:
            raise TypeError from None

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("jobs.demo.play.play", interrupted)
    assert run(monkeypatch, "demo") == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stack_trace_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["headwater", "describe", "no_such_module:flow"])
    with pytest.raises(LoadError):
        main()


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["run"],
        ["run", "jobs.demo.flow:flow", "--no-such-option"],
        ["demo", "--flights", "1"],
        ["demo", "--flights", "many"],
        ["republish", "jobs.demo.flow:legs", "--from", "a"],
        ["stack", "up", "--heap", "1"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_in_two(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == Exit.USAGE
    assert "Usage: headwater" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["republish", "jobs.demo.flow:legs", "--from", "a", "--to", "b", "--via", "v", option, ""]
            for option in ("--from", "--to", "--via", "--group", "--instance", "--dead-letters", "--bootstrap")
        ),
        *(
            ["run", "jobs.demo.flow:flow", option, ""]
            for option in ("--group", "--dead-letters", "--bootstrap", "--master")
        ),
        ["plan", "jobs.demo.flow:flow", "--master", ""],
        ["redrive", "--from", ""],
        ["redrive", "--from", "dead", "--mend", ""],
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_an_empty_text_is_refused_and_does_not_count_as_a_missing_option(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == Exit.USAGE
    assert f"Invalid value for '{arguments[-2]}': it is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "jobs.demo.flow:legs"], "jobs.demo.flow:legs is not a Flow but a function"),
        (["run", "shop.py:flow"], "shop.py is a file: write shop:flow"),
        (["run", "jobs.demo.flow:flow"], "no Kafka: give --bootstrap HOST:PORT"),
        (["run", "jobs.demo.flow:flow", "--bootstrap", "b:1", "--store", "here"], "--store: write URL or STAGE=URL"),
        (["run", "jobs.demo.flow:flow", "--bootstrap", "b:1", "--conf", "spark"], "--conf: write NAME=VALUE"),
        (["inspect", "jobs.demo.flow:flow"], "has the stages aircraft, carrier: give --stage"),
        (["inspect", "jobs.demo.flow:flow", "--stage", "carrier", "--store", "memory://m"], "in the memory of one"),
        *(
            (
                [*command.split(), "--from", "dead", "--reason", "fold"],
                "--reason fold: unknown reason code; choose from",
            )
            for command in ("redrive", "discard jobs.demo.flow:flow")
        ),
        (["demo", "--store", "memory://m"], "a store that they can share"),
        (
            ["republish", "jobs.demo.flow:flow", "--from", "a", "--to", "b", "--via", "v", "--bootstrap", "b:1"],
            "jobs.demo.flow:flow is not a function but a Flow",
        ),
        (
            ["republish", "jobs.demo.flow:legs", "--from", "a", "--to", "a", "--via", "v", "--bootstrap", "b:1"],
            "a is read and written",
        ),
        (
            "republish jobs.demo.flow:legs --from a --to b --via v --bootstrap b:1 --input xml".split(),
            "unknown input format 'xml'",
        ),
        (
            "republish jobs.demo.flow:legs --from a --to b --via v --bootstrap b:1 --tombstones keep".split(),
            "unknown policy for tombstones 'keep'",
        ),
        *(
            (f"run jobs.demo.flow:flow --bootstrap b:1 {option} soon".split(), f"{option}: 'soon' is not a duration")
            for option in ("--trigger", "--metadata-max-age")
        ),
        *(
            (
                f"republish jobs.demo.flow:legs --from a --to b --via v --bootstrap b:1 {option} soon".split(),
                f"{option}: 'soon' is not a duration",
            )
            for option in ("--topic-wait", "--metadata-max-age")
        ),
        *(
            (f"republish x:y --from a --to b --via v {option}=".split(), f"'{option}': it is empty")
            for option in ("--deduplicate", "--store")
        ),
        ("republish x:y --from a --to b --via v --store memory://s".split(), "in the memory of one process"),
        (["inspect", "jobs.demo.flow:flow", "--limit", "9" * 30], "Invalid value for '--limit'"),
        (["inspect", "jobs.demo.flow:flow", "--generation", "9" * 30], "Invalid value for '--generation'"),
        (["schema", "print", "states"], "the URL of a store has no scheme"),
        (["schema", "print", "cassandra://host"], "names no keyspace"),
        (["schema", "apply", "cassandra://host/fleet?copies=3"], "has no option 'copies'"),
        (["schema", "apply", "mongodb://host/fleet"], "no store has the scheme 'mongodb'"),
        *(
            (["inspect", "jobs.demo.flow:flow", "--stage", "aircraft", "--store", url], said)
            for url, said in (
                ("foo://x", "no store has the scheme 'foo'"),
                ("redis://host?nosuch=1", "has no option 'nosuch'"),
                ("redis://host?buckets=many", "the value of 'buckets' is invalid"),
                ("redis://[::1", "the URL of a store is invalid"),
                ("sqlite://", "names no file"),
            )
        ),
    ],
)
def test_what_cannot_be_used_is_named_with_the_remedy(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADWATER_KAFKA_BOOTSTRAP", raising=False)
    assert run(monkeypatch, *arguments) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_the_version_is_the_distribution_s(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"headwater {version('headwater')}\n"


def test_describe_draws_the_flow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "describe", "jobs.demo.flow:flow") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "flights"
    assert "flights.legs" in lines[1]
    assert sum("vectorised" in line for line in lines) == 4
    assert run(monkeypatch, "describe", "jobs.demo.flow:flow", "--json") == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["flow"], said.err) == ("flights", "")
    assert list(told["steps"][0].values()) == ["source", "flights.legs, tombstones dead_letter", "", ""]
    assert [one["path"] for one in told["steps"]].count("vectorised") == 4
    assert {"name": "generation", "value": "live", "origin": "default"} in told["settings"]


def test_a_picture_is_written_besides_what_describe_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from jobs.demo.flow import flow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWATER_STORE", "lmdb:///states")
    assert run(monkeypatch, "describe", "jobs.demo.flow:flow", "--json") == 0
    shown = capsys.readouterr().out
    assert run(monkeypatch, "describe", "jobs.demo.flow:flow", "--json", "--svg", "flow.svg") == 0
    assert capsys.readouterr() == (shown, "picture: flow.svg\n")
    assert Path("flow.svg").read_text() == flow.describe_svg(dict.fromkeys(flow.stage_names, "lmdb:///states"))


def test_a_schema_is_printed_for_a_person_to_run_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "cassandra://nowhere/fleet?replication=paris:3,oslo:2"
    assert run(monkeypatch, "schema", "print", url) == 0
    shown = capsys.readouterr().out
    assert run(monkeypatch, "schema", "print", url, "--json") == 0
    statements = json.loads(capsys.readouterr().out)["statements"]
    assert shown == "\n\n".join(f"{statement};" for statement in statements) + "\n"
    assert [line.split("(")[0].split()[5] for line in statements] == ["fleet", "fleet.flow", "fleet.state", "fleet.due"]
    assert "'paris': 3, 'oslo': 2" in statements[0]


def test_a_store_without_a_schema_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("print", "apply"):
        assert run(monkeypatch, "schema", verb, "sqlite://states.db") == 0
        out, err = capsys.readouterr()
        assert out == ""
        assert err.endswith("this store creates what it needs\n")


def test_every_fault_point_and_outcome_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "faults") == 0
    shown = capsys.readouterr().out
    assert run(monkeypatch, "faults", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["points"] == known_points()
    assert list(told["outcomes"]) == ["before", "after", "error", "unanswered"]
    assert all(text in shown for part in told.values() for pair in part.items() for text in pair)


def test_nothing_runs_in_an_empty_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "stack", "status", "--json", "--root", str(tmp_path)) == Exit.FAILED
    assert capsys.readouterr().out == '{"servers": []}\n'
    assert run(monkeypatch, "stack", "down", "--root", str(tmp_path / "none")) == 0


def test_help_answers_without_loading_what_only_commands_need() -> None:
    code = (
        "import sys, jobs.cli; heavy = {'polars', 'pyspark', 'confluent_kafka', 'rich.progress', 'numpy'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

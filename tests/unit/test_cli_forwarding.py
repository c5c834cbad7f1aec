"""Every option of every command reaches what it is for, and changes nothing else."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from jobs.cli import app
from jobs.cli.errors import Exit
from tests.support.cli import run
from tests.support.commands import COMMANDS, ELSEWHERE, Calls, Command, Exact, Option, plant, recorded_in


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    return recorded_in(tmp_path, monkeypatch)


def words(command: Command, option: Option) -> list[str]:
    assert option.without in command.words
    if option.without:
        return command.words.replace(option.without, option.words).split()
    return [*command.words.split(), *option.words.split()]


def at(given: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of names, attributes and keys; a key's own dots are written as zeros."""

    def step(found: Any, name: str) -> Any:
        name = name.replace("\0", ".")
        return found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)

    return reduce(step, path.split("."), given)


def parameters(command: Any, path: str = "headwater") -> Iterator[tuple[str, str]]:
    for one in command.params:
        if one.name != "help":
            yield path, one.name
    for name, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, f"{path} {name}")


def untouched(given: Any, touched: set[str], place: str = "") -> Any:
    """Everything but the values at dotted paths; what has no names of its own is left out as a whole."""
    inside = any(one.startswith(f"{place}.") for one in touched)
    if is_dataclass(given) and not isinstance(given, type) and inside:
        given = {one.name: getattr(given, one.name) for one in fields(given)}
    if isinstance(given, Mapping) and (inside or not place):
        above = f"{place}." if place else ""
        paths = {name: above + name.replace(".", "\0") for name in given}
        return {
            name: untouched(value, touched, paths[name]) for name, value in given.items() if paths[name] not in touched
        }
    return None if inside else given


def command_of(path: str) -> str:
    """A path without what is in brackets: which form of the command it is."""
    return path.partition(" (")[0]


FORWARDED = [(path, name) for path, command in COMMANDS.items() for name in command.options]


def test_every_option_of_every_command_is_in_the_table() -> None:
    """A new option has to be: then it is known to arrive."""
    known = {(command_of(path), name) for path, name in FORWARDED} | {
        *((path, name) for path, names in ELSEWHERE.items() for name in names)
    }
    assert known == set(parameters(get_command(app)))


@pytest.mark.parametrize(("path", "name"), FORWARDED, ids=[f"{path} {name}" for path, name in FORWARDED])
def test_an_option_reaches_what_it_is_for_and_changes_nothing_else(
    path: str, name: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = COMMANDS[path]
    option = command.options[name]
    result = Exact() if path == "headwater demo" else None
    plant(calls, command, monkeypatch, result)
    base = [*command.words.split()]
    if path == "headwater demo":
        monkeypatch.setattr("jobs.demo.report.show", lambda _: None)
    assert run(monkeypatch, *base) == Exit.DONE
    capsys.readouterr()
    assert run(monkeypatch, *words(command, option)) == Exit.DONE
    without, given = calls.given[0], calls.given[-1]
    out = capsys.readouterr().out
    if option.lines:
        assert out
        assert all(isinstance(json.loads(line), dict) for line in out.splitlines())
    else:
        assert option.reaches
    for place, wanted in option.reaches.items():
        assert at(given, place) == wanted
        assert at(without, place) != wanted
    touched = {*option.reaches} | made_anew(path, name)
    assert untouched(given, touched) == untouched(without, touched)


@pytest.mark.parametrize(
    ("path", "option", "whose"),
    [
        *(
            (f"headwater copy ({form})", option, "topics")
            for form in ("lines", "rows")
            for option in (
                "--from-cluster west=w:1",
                "--tombstones dead_letter",
                "--accept compacted-source",
                "--dead-letters d",
            )
        ),
        ("headwater copy (rows)", "--input json", "topics and lines"),
        ("headwater copy", "--key till", "lines and rows"),
        *(
            (path, option, "rows of a database")
            for path in ("headwater copy", "headwater copy (lines)")
            for option in ("--query SELECT(1)", "--column a")
        ),
    ],
)
def test_an_option_of_another_source_is_refused_and_not_ignored(
    path: str,
    option: str,
    whose: str,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(calls, COMMANDS[path], monkeypatch)
    assert run(monkeypatch, *COMMANDS[path].words.split(), *option.split()) == Exit.USAGE
    assert f"{option.split()[0]} is for {whose}" in capsys.readouterr().err
    assert calls.given == []


def made_anew(path: str, name: str) -> set[str]:
    """Arguments that follow from another one, or are new in every call."""
    if path == "headwater demo":
        return {"home", "store"}
    return {"flow": {"flow", "stores", "stage"}, "against": {"against"}}.get(name, set())

"""`headwater new`: its files, its refusals, and its output."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from jobs.cli.errors import Exit
from jobs.new import template
from tests.support.cli import run

FILES = ["Makefile", "README.md", ".gitignore", "job.py", "produce.py", "republisher.py", "shop.py", "test_shop.py"]
COMMANDS = ["pip install pytest", "make test", "make run"]


def test_a_project_is_written_and_the_next_commands_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "new", "a/my shop") == Exit.DONE
    project = tmp_path / "a" / "my shop"
    assert {path.name: path.read_bytes() for path in project.iterdir()} == {
        name: file.read_bytes() for name, file in template().items()
    }
    assert list(template()) == FILES
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-4:] == [f"  {command}" for command in ("cd 'a/my shop'", *COMMANDS)]


def test_a_program_gets_the_same_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    project = tmp_path / "shop"
    assert run(monkeypatch, "new", str(project), "--json") == Exit.DONE
    assert json.loads(capsys.readouterr().out) == {
        "directory": str(project),
        "files": FILES,
        "next": [f"cd {project}", *COMMANDS],
    }


def test_the_current_directory_will_do_when_it_is_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "new", ".", "--json") == Exit.DONE
    assert json.loads(capsys.readouterr().out)["next"] == COMMANDS
    assert {path.name for path in tmp_path.iterdir()} == {*FILES}


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_a_directory_that_is_not_empty_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "mine")
    assert run(monkeypatch, "new", str(tmp_path)) == Exit.USAGE
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"headwater: {tmp_path} is not empty: choose an empty or a new directory\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("place", ["file", "file/shop"])
def test_a_place_where_no_directory_can_be_is_named(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    assert run(monkeypatch, "new", str(tmp_path / place)) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headwater: cannot write to {tmp_path / place}: ")
    assert err.endswith("; choose another directory\n")


@pytest.mark.parametrize("name", [Path(name).stem for name in FILES if name.endswith(".py")])
def test_no_file_of_the_project_hides_a_module_that_is_installed(name: str) -> None:
    assert find_spec(name) is None

"""The project of `headwater new`, created by the installed wheel and used as its README describes."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("new") / "shop"
    done = installed.run("headwater", "new", str(directory))
    assert done.returncode == 0, done.stderr
    return directory


def used(installed, project: Path, *command: str) -> str:
    """The output of a command in the project, with the environment of the wheel first on PATH."""
    path = f"{installed.home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_own_tests_pass(installed, project: Path) -> None:
    assert "3 passed" in used(installed, project, "make", "test")


def test_its_flow_can_be_described(installed, project: Path) -> None:
    lines = used(installed, project, "headwater", "describe", "shop:flow").splitlines()
    assert lines[0] == "shop"
    assert [line.split()[-1] for line in lines if "aggregate" in line] == ["vectorised", "fold"]


def test_make_lists_its_targets(installed, project: Path) -> None:
    shown = used(installed, project, "make")
    assert {line.split()[1] for line in shown.splitlines()} >= {"test", "run", "crash", "submit", "down"}

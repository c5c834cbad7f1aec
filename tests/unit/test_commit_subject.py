"""The hook that checks commit messages, and the configuration that names it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.commit_subject import LONGEST, problem

ROOT = Path(__file__).parents[2]
FITS = "x" * LONGEST
GIT = "\n# Please enter the commit message for your changes.\n# On branch main\n"


@pytest.mark.parametrize(
    "message",
    [
        FITS,
        f"{FITS}\n",
        f"{FITS}\n{GIT}",
        f"{FITS}\n\nA reason that is on a line of its own, and as long as it has to be to say what it has to say.\n",
        f"\n{FITS}\n",
        f"{FITS}\n\n# ------------------------ >8 ------------------------\ndiff --git a/x b/x\n",
    ],
)
def test_a_subject_that_fits_is_accepted(message: str) -> None:
    assert problem(message) == ""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (f"{FITS}x\n", f"has {LONGEST + 1} characters"),
        (f"{FITS}\nThe reason.\n", "leave the line after the subject empty"),
        ("", "no subject"),
        (GIT, "no subject"),
    ],
)
def test_any_other_message_is_refused(message: str, said: str) -> None:
    assert said in problem(message)


@pytest.mark.parametrize(("subject", "code"), [(FITS, 0), (f"{FITS}x", 1)])
def test_the_hook_s_exit_code_tells_git(subject: str, code: int, tmp_path: Path) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(subject)
    command = [sys.executable, "-m", "tests.commit_subject", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert bool(done.stderr) == bool(code)


def test_every_hook_is_a_tool_of_the_project_s_own_environment() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    [repository] = config["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        tool, *arguments = hook["entry"].split()
        assert Path(tool).parent == Path(".venv/bin")
        assert (Path(sys.executable).parent / Path(tool).name).exists()
        if "-m" in arguments:
            assert (ROOT / (arguments[arguments.index("-m") + 1].replace(".", "/") + ".py")).exists()

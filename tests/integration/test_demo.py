"""The demo as a user runs it, with its own broker and its three kills."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs import stack
from jobs.demo.play import play
from jobs.screen import steps

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COMMAND = [sys.executable, "-m", "jobs.cli", "demo", "--flights", "4000", "--json"]


def start(tmp_path: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment
    )


def processes_in(directory: Path) -> list[str]:
    """What still runs with anything of that directory in its command, environment or working directory."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or process.name == str(os.getpid()):
            continue
        try:
            told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            told += os.readlink(process / "cwd").encode()
        except OSError:
            continue
        if str(directory).encode() in told:
            found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
    return found


def test_the_demo_is_exact_accounts_for_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = start(tmp_path)
    out, err = run.communicate()
    assert run.returncode == 0, err
    told = json.loads(out)
    assert told["exact"] is True
    assert (told["flights"], told["mismatches"], told["crashes"]) == (4000, 0, 3)
    assert told["resent"] > 0
    assert told["messages"] > 7900 + told["resent"]
    assert told["dropped"]["duplicate"] >= told["resent"]
    assert told["keys"]["carrier"] == 15
    assert {"empty", "truncated", "null_key", "transform_failed", "diverted"} <= told["dead_letters"].keys()
    assert processes_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_signal_right_after_the_servers_have_started_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted(title: str) -> Iterator[Callable[[str], None]]:
        """The signal arrives when the last step was shown."""
        with steps(title) as step:
            yield step
        sys.exit(128 + signal.SIGTERM)

    monkeypatch.setattr("jobs.demo.play.steps", interrupted)
    with pytest.raises(SystemExit):
        play(100, f"lmdb://{tmp_path}/states", tmp_path)
    assert stack.status(tmp_path / "stack") is None
    assert processes_in(tmp_path) == []


def test_a_demo_that_is_stopped_on_the_way_ends_what_it_started(tmp_path: Path) -> None:
    run = start(tmp_path)
    assert run.stderr is not None
    for line in run.stderr:
        if line.startswith("servers: kafka: ready"):
            break
    run.send_signal(signal.SIGTERM)
    run.communicate()
    assert run.returncode == 128 + signal.SIGTERM
    assert processes_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []

"""The demo's processes: the command line, started anew, and killed where it is told to be."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jobs
from persistence.commit.faults import SPEC
from persistence.kafka.settings import ENV_PREFIX

_GRACE_SECONDS: Final = 20.0


class DemoError(RuntimeError):
    """A part of the demo did not do what it was started for; the text says where to look."""


def run(
    name: str, arguments: Sequence[str], home: Path, *, fault: str = "", on_line: Callable[[dict[str, Any]], None]
) -> None:
    """Run `headwater ARGUMENTS` as a process of its own until it ends.

    Args:
        name: What it is called in messages and in the name of its log.
        arguments: Command and options; what it writes to standard output is JSON lines.
        home: Its directory; its log goes there.
        fault: Where it must kill itself (`HEADWATER_FAULT`); empty when it must not.
        on_line: Called with each line.

    Raises:
        DemoError: It ended otherwise than it should: it failed, or it was not killed.
    """
    scratch = home / "tmp"
    scratch.mkdir(exist_ok=True)
    log = home / f"{name.replace(', ', '-').replace(' ', '-')}.log"
    with log.open("ab") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            cwd=home,
            env=_environment(fault) | {"TMPDIR": str(scratch)},
            start_new_session=True,
            text=True,
        )
    try:
        assert child.stdout is not None
        for line in child.stdout:
            # The last line of a killed process may be torn.
            with contextlib.suppress(json.JSONDecodeError):
                on_line(json.loads(line))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    finally:
        code = _end(child)
    if fault and code != -signal.SIGKILL:
        raise DemoError(f"{name} ended with exit code {code}, it should have been killed at {fault} (log: {log})")
    if not fault and code != 0:
        raise DemoError(f"{name} failed with exit code {code}: {_last_line(log)} (log: {log})")


def _environment(fault: str) -> dict[str, str]:
    """The environment without settings of another Kafka, and with our packages in reach."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX) and name != SPEC}
    found = [str(Path(jobs.__file__).parents[1]), *filter(None, [ours.get("PYTHONPATH")])]
    return {**ours, "PYTHONPATH": os.pathsep.join(found), **({SPEC: fault} if fault else {})}


def _end(child: "subprocess.Popen[str]") -> int:
    """End the process, if it runs, and what it started; return its exit code.

    Its process group is its own for as long as it is not reaped, so nobody else's process can be hit.
    """
    if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"

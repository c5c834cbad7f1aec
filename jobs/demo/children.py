"""The demo's processes: they run the command line, and are killed at fault points."""

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
    """A part of the demo failed; the text names the log to check."""


def run(
    name: str, arguments: Sequence[str], home: Path, *, fault: str = "", on_line: Callable[[dict[str, Any]], None]
) -> None:
    """Run `headwater ARGUMENTS` in a separate process until it ends.

    Args:
        name: Its name in messages and in the name of its log.
        arguments: Command and options; its standard output must be JSON lines.
        home: Directory for its log.
        fault: Fault point at which it must kill itself (`HEADWATER_FAULT`); empty for none.
        on_line: Called with each line.

    Raises:
        DemoError: It failed, or was not killed at the fault point.
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
            # The last line of a killed process may be incomplete.
            with contextlib.suppress(json.JSONDecodeError):
                on_line(json.loads(line))
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    finally:
        code = _end(child)
    if fault and code != -signal.SIGKILL:
        raise DemoError(f"{name} ended with exit code {code} instead of being killed at {fault} (log: {log})")
    if not fault and code != 0:
        raise DemoError(f"{name} failed with exit code {code}: {_last_line(log)} (log: {log})")


def _environment(fault: str) -> dict[str, str]:
    """The environment without settings for another Kafka, and with headwater on the import path."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX) and name != SPEC}
    found = [str(Path(jobs.__file__).parents[1]), *filter(None, [ours.get("PYTHONPATH")])]
    return {**ours, "PYTHONPATH": os.pathsep.join(found), **({SPEC: fault} if fault else {})}


def _end(child: "subprocess.Popen[str]") -> int:
    """End the process, if it is running, and its children; return its exit code.

    Until the process is reaped, its process group id cannot be reused, so no other process can be hit.
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
    return lines[-1] if lines else "no output"

"""Processes that outlive the command that started them. Their start time distinguishes them from later processes."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_POLL_SECONDS = 0.05


def spawn(command: Sequence[str], log: Path, home: Path, environment: Mapping[str, str] | None = None) -> int:
    """Start `command` in its own session, so that Ctrl-C in a terminal does not reach it, and return its pid."""
    with log.open("ab") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=home,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    child.returncode = 0  # It continues after this process: Popen must not warn about it.
    return child.pid


def start_of(pid: int) -> str | None:
    """When a process began, as the system reports it; None if it has ended."""
    _reap(pid)
    try:
        # The command's name may contain spaces and brackets. After it: state, ..., start time in ticks.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # The first thread of a killed process can end before the others, which still hold its ports and files.
        return None if fields[0] == "Z" and fields[17] == "1" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except ProcessLookupError:
        return None
    told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return told.stdout.strip() or None


def stop(pid: int, started: str, grace_seconds: float) -> bool:
    """End a process: SIGTERM, then SIGKILL after `grace_seconds`. Return whether SIGTERM was enough."""
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 10.0)):
        if start_of(pid) != started:
            return True
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return True
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if start_of(pid) != started:
                return number is signal.SIGTERM
            time.sleep(_POLL_SECONDS)
    return False


def _reap(pid: int) -> None:
    """Collect a child that has ended; do nothing for a process that is not a child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)

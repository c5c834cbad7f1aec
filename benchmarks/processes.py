"""CPU time and memory of processes, from /proc."""

import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

TICKS: Final = os.sysconf("SC_CLK_TCK")
_GRACE_SECONDS: Final = 20.0


def cpu(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended; 0 for one that has ended itself."""
    fields = _stat(pid)
    return sum(int(fields[i]) for i in (11, 12, 13, 14)) / TICKS if fields else 0.0


def peak(pid: int) -> int:
    """The most resident memory that a process ever had, in MB."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = status.partition("VmHWM:")[2].split()  # a process that has ended has none
    return int(found[0]) // 1024 if found else 0


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that still run."""
    return _started().get(pid, [])


def parts(root: int) -> dict[str, list[int]]:
    """Processes of an application by part.

    Returns:
        `jvm`: Java processes, executors too; `workers`: Spark's other Python processes; `driver`: the rest.
    """
    started = _started()
    found: dict[str, list[int]] = {"driver": [], "jvm": [], "workers": []}
    stack = [(root, False)]
    while stack:
        pid, below = stack.pop()
        below = below or _is_daemon(pid)
        is_java = _is_java(pid)
        found["jvm" if is_java else "workers" if below else "driver"].append(pid)
        stack += [(child, below or is_java) for child in started.get(pid, [])]
    return {part: pids for part, pids in found.items() if pids}


def spent(pids: Mapping[str, Iterable[int]]) -> dict[str, float]:
    """CPU seconds so far by part."""
    return {part: sum(map(cpu, some)) for part, some in pids.items()}


def memory(pids: Mapping[str, Iterable[int]]) -> dict[str, int]:
    """Peak resident MB by part: of its largest process, since workers share much of theirs."""
    return {part: max(map(peak, some), default=0) for part, some in pids.items()}


def end(root: int) -> None:
    """End a child of this process and everything it started: SIGTERM, then SIGKILL."""
    pids = [pid for some in parts(root).values() for pid in some]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            try:
                os.waitpid(root, os.WNOHANG)
            except ChildProcessError:
                pass
            if not any(_stat(pid) for pid in pids):
                return
            time.sleep(0.05)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the command's name; none for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] == "Z" else fields


def _started() -> dict[int, list[int]]:
    """The children of every process."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            found.setdefault(int(fields[1]), []).append(int(entry.name))
    return found


def _is_daemon(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"aggregations.spark.daemon" in command or b"aggregations.spark.python_ahead" in command
    except OSError:
        return False


def _is_java(pid: int) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name == "java"
    except OSError:
        return False

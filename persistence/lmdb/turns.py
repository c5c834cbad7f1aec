"""Processes that write to an environment take turns, and do not wait for ever for one that does not go on.

LMDB's own lock is released when its holder dies, but it waits without limit for a process that was stopped. So a writer
first takes a lock on the data file (flock(2)), for which it waits for a limited time.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from persistence.errors import Transient
from persistence.names import FlowRef, StageRef

BUSY_SECONDS: Final = 30.0
"""How long a writer waits for the others."""
_PAUSE_SECONDS: Final = 0.05
"""Longest pause between two tries."""


class Turns:
    """The lock of one environment.

    Args:
        file: Its data file, which exists.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor = os.open(file, os.O_RDONLY)

    @contextmanager
    def turn(self, ref: FlowRef | StageRef) -> Iterator[None]:
        """Hold the lock.

        Raises:
            Transient: Other processes held it all the time. The text names the one that holds it.
        """
        deadline, pause = time.monotonic() + BUSY_SECONDS, 0.001
        while not self._take():
            if time.monotonic() > deadline:
                raise Transient(
                    f"{self._holder()} has been writing to {self._file.parent} for {BUSY_SECONDS:g} s",
                    "If it was stopped (SIGSTOP), continue or end it",
                    ref=ref,
                )
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _take(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holder(self) -> str:
        """The process that holds the lock, as the system tells it (proc(5), /proc/locks)."""
        inode = f":{os.fstat(self._descriptor).st_ino}"
        with suppress(OSError, ValueError):
            for line in Path("/proc/locks").read_text().splitlines():
                _, kind, _, _, process, place, *_ = line.split()
                if kind == "FLOCK" and place.endswith(inode):
                    return f"process {process}"
        return "another process"

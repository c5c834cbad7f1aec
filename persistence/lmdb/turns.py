"""Processes that write to an environment take turns, and do not wait for ever for one that does not go on.

LMDB's own lock is released when its holder dies, but it waits without limit for a process that was stopped. So a writer
first takes a lock on the data file (flock(2)), for which it waits for a limited time.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final

from persistence.errors import Transient
from persistence.names import FlowRef, StageRef

BUSY_SECONDS: Final = 30.0
"""How long a writer waits for the others."""


@contextmanager
def turn(file: Path, ref: FlowRef | StageRef) -> Iterator[None]:
    """Hold the lock of an environment.

    A thread waits where the system wakes it: a writer that tried again and again would leave the environment unused
    between two tries, and seldom come before one that does not pause.

    Args:
        file: The data file, which exists.
        ref: What is written.

    Raises:
        Transient: Other processes held it all the time. The text names the one that holds it.
    """
    descriptor = os.open(file, os.O_RDONLY)
    waits, decided, granted = False, Lock(), Event()

    def wait() -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if decided.acquire(blocking=False):
            granted.set()
        else:  # too late
            _release(descriptor)

    try:
        if not _take(descriptor):
            Thread(target=wait, daemon=True).start()
            waits = True
            if not granted.wait(BUSY_SECONDS):
                raise Transient(
                    f"{_holder(descriptor)} has been writing to {file.parent} for {BUSY_SECONDS:g} s",
                    "If it was stopped (SIGSTOP), continue or end it",
                    ref=ref,
                )
        yield
    finally:
        if not waits or not decided.acquire(blocking=False):
            _release(descriptor)


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a child that has inherited the file
    os.close(descriptor)


def _holder(descriptor: int) -> str:
    """The process that holds the lock, as the system tells it (proc(5), /proc/locks)."""
    inode = f":{os.fstat(descriptor).st_ino}"
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, place, *_ = line.split()
            if kind == "FLOCK" and place.endswith(inode):
                return f"process {process}"
    return "another process"

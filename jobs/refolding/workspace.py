"""A directory for the states of one command. It is deleted with the command, or by the next one."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final

from jobs.environment import UsageError

_PREFIX: Final = "fold-"
_LOCK: Final = "lock"


@contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """A new, empty directory, deleted after the block. What killed processes left in `parent` is deleted first.

    Args:
        parent: Where to create it; it is created if necessary. Processes may share it.

    Raises:
        UsageError: It cannot be created or written.
    """
    try:
        directory, lock = _created(parent)
    except OSError as error:
        raise UsageError(f"{parent}: {error.strerror}; give another directory with --work") from error
    with lock:
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _created(parent: Path) -> tuple[Path, IO[str]]:
    """A directory, and its lock: as long as its process lives, the lock is held."""
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / _LOCK).open("w") as others, ExitStack() as stack:
        fcntl.flock(others, fcntl.LOCK_EX)  # no other process takes a new directory for one that was left
        _delete_left(parent)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = stack.enter_context((directory / _LOCK).open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        stack.pop_all()
        return directory, lock


def _delete_left(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            with (directory / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # at work
        except OSError:
            pass
        shutil.rmtree(directory, ignore_errors=True)

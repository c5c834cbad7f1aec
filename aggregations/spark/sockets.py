"""Where processes of one machine listen for each other."""

import fcntl
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_STDERR: Final = 2
_LONGEST_PARENT: Final = 50  # bytes; the path of a socket may have 103 on macOS and 107 on Linux


def socket_parent() -> Path:
    """The directory for temporary directories with sockets, whose paths must be short."""
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > _LONGEST_PARENT:
        return Path("/tmp")  # noqa: S108 - mkdtemp makes a directory that only this user may read
    return parent


def listen(address: Path) -> socket.socket:
    """A socket that listens at a path. Its number is not one of a standard stream's, should this process have closed one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if listener.fileno() <= _STDERR:
        with listener:
            listener = socket.socket(fileno=fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1))
    listener.bind(str(address))
    listener.listen(64)
    return listener


def socket_directory(prefix: str) -> tuple[Path, int]:
    """Make a directory for sockets, and delete those that processes left behind that were killed.

    Args:
        prefix: What the name of the directory begins with.

    Returns:
        The directory, and the file descriptor of its lock: the directory is in use until the last process closes it.
    """
    parent = socket_parent()
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # an unreadable directory belongs to another user
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(directory, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return directory, lock

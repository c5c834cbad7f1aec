"""Spark's Python daemon, started before Spark needs it.

Spark starts its daemon for the first task, and importing what workers need takes a second. So the process that starts
the JVM starts a daemon as well, which imports while the JVM starts. The daemon that Spark starts later passes its
standard streams and its environment to that one, and waits until it ends. If it cannot, it becomes the daemon itself.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from aggregations.spark.sockets import socket_parent

ADDRESS: Final = "HW_PYTHON_DAEMON"
"""Environment variable of the JVM: the socket of the daemon that was started ahead."""

_SIZE: Final = struct.Struct("!i")
_STREAMS: Final = (0, 1, 2)
# What Python and its modules read when they start. Spark sets these for each of its daemons.
_READ_AT_START: Final = ("PYTHON", "POLARS_", "OMP_", "OPENBLAS_", "MKL_", "NUMBA_", "LD_", "DYLD_", "HEADWATER_CACHE")
_SPARKS_OWN: Final = ("PYTHONPATH", "PYTHON_")


class DaemonAhead:
    """The starting process's side: a daemon that ends with this process unless Spark's daemon takes it over.

    Args:
        environment: Environment variables of Spark's Python workers.

    Attributes:
        address: Its socket.
        process: Its process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="headwater-daemon-", dir=socket_parent()))
        self.address = self._directory / "address"
        with _listen(self.address) as listener:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aggregations.spark.daemon_ahead", str(listener.fileno()), str(self._directory)],
                stdin=subprocess.PIPE,
                stdout=2,
                env=dict(environment),
                pass_fds=[listener.fileno()],
                process_group=0,
            )

    def end(self) -> None:
        """End it if nobody has taken it over."""
        if self._directory.exists():
            self.process.kill()
            self.process.wait()
            shutil.rmtree(self._directory, ignore_errors=True)


def hand_over() -> None:
    """Spark's side: let the daemon that was started ahead do the work, and end with it. Returns if there is none."""
    address = os.environ.pop(ADDRESS, "")
    if not address:
        return
    about = {"environment": dict(os.environ), "path": sys.path, "directory": str(Path.cwd()), "python": sys.executable}
    body = json.dumps(about).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect(address)
        socket.send_fds(channel, [_SIZE.pack(len(body))], _STREAMS)
        channel.sendall(body)
        if channel.recv(1):
            channel.recv(1)  # until it ends
            os._exit(0)


def take_over(listener: socket.socket, directory: Path) -> None:
    """The started process's side: wait for Spark's daemon and take its place.

    Ends this process if the one that started it ends, or if Spark's daemon was started otherwise than this one.
    """
    ready, _, _ = select.select([listener.fileno(), 0], [], [])
    if listener.fileno() not in ready:
        shutil.rmtree(directory, ignore_errors=True)
        sys.exit()
    channel, _ = listener.accept()
    listener.close()
    shutil.rmtree(directory, ignore_errors=True)
    size, streams, _, _ = socket.recv_fds(channel, _SIZE.size, len(_STREAMS))
    with channel.makefile("rb") as reader:
        about = json.loads(reader.read(*_SIZE.unpack(size)))
    if not _fits(about):
        sys.exit()
    for stream, number in zip(streams, _STREAMS, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(about["environment"])
    os.chdir(about["directory"])
    sys.path[:] = about["path"]
    channel.sendall(b"1")
    os.register_at_fork(after_in_child=channel.close)  # and so it stays open as long as this process runs


def _fits(about: Mapping[str, Any]) -> bool:
    """Whether Spark's daemon would import what this process has imported."""
    return bool(about["python"] == sys.executable and _at_start(about["environment"]) == _at_start(os.environ))


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and not name.startswith(_SPARKS_OWN)
    }


def _listen(address: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if listener.fileno() in _STREAMS:  # this process has closed one, and the daemon's own streams take these numbers
        with listener:
            listener = socket.socket(fileno=fcntl.fcntl(listener, fcntl.F_DUPFD_CLOEXEC, len(_STREAMS)))
    listener.bind(str(address))
    listener.listen(1)
    return listener


def main() -> None:
    """Import, wait for Spark's daemon, and become the daemon."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from aggregations.spark import daemon

    daemon.warm_up()
    daemon.load()
    take_over(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))
    daemon.from_package()
    daemon.serve()


if __name__ == "__main__":
    main()

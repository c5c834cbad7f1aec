"""Spark's Python daemon, with warm-up: modules that every worker needs are imported once, before it forks workers.

Spark calls `importlib.invalidate_caches()` in every task, which reads the directory of pyspark.zip
again: measured at 0.45 s per task. Nothing is added to that archive during a run.
"""

import gc
import io
import os
import signal
import socket
import sys
import zipimport
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LOADED_SECONDS = 2.0
"""More CPU time than it takes to load compiled code, and much less than it takes to compile it."""
_BUFFER_BYTES = 1 << 16
_COMPILES = b"headwater: compiling code for this machine, once; this takes half a minute or more\n"


def _do_nothing(importer: zipimport.zipimporter) -> None:
    """The archive does not change."""


def own_archive() -> Path | None:
    """The archive that is part of the package PySpark, if this Python finds the package."""
    found = find_spec("pyspark")
    return Path(found.origin).parent / "python" / "lib" / "pyspark.zip" if found and found.origin else None


def from_package() -> None:
    """Import PySpark from the package that its archive is part of, if there is one: the archive has no bytecode.

    Measured: 0.4 s of CPU instead of 1.4.
    """
    before = list(sys.path)
    sys.path[:] = [path for path in before if not path.endswith("pyspark.zip")]
    own = own_archive()
    if own is None or str(own) not in before:
        sys.path[:] = before


def load() -> None:
    """Load the code that numba compiles if this machine has not run it before: once, for all residents.

    Two processes compile: what reads messages takes as long as what reads and writes states.
    """
    from aggregations.columns.prepare import load_reading, prepare
    from aggregations.spark.residents import fork_child

    compiles = False

    def notice(*_: object) -> None:
        nonlocal compiles
        compiles = True
        os.write(2, _COMPILES)

    other = fork_child(signal.SIGKILL, prepare)  # if it fails, this process compiles it again, with the same error
    before = signal.signal(signal.SIGPROF, notice)
    signal.setitimer(signal.ITIMER_PROF, _LOADED_SECONDS)
    load_reading()
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.signal(signal.SIGPROF, before)
    if not compiles:
        os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    prepare()


class _Acknowledging(io.FileIO):
    """What arrives at a TCP socket, acknowledged at once.

    Args:
        connection: The socket; it stays open.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection.fileno(), closefd=False)
        self._connection = connection
        self._acknowledge()

    def readinto(self, buffer: Any) -> int | None:
        read = super().readinto(buffer)
        self._acknowledge()
        return read

    def _acknowledge(self) -> None:
        """Send what is delayed, and delay the next acknowledgement no more; the kernel may take that back."""
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _answer_at_once() -> None:
    """Let workers acknowledge at once what Spark sends, and send at once what it waits for.

    Spark writes to a worker in small parts. By Nagle's algorithm (RFC 896) each of them waits until the one before it
    is acknowledged, and a receiver delays that by up to 40 ms: several times in every task.
    """
    if not hasattr(socket, "TCP_QUICKACK"):
        return
    from pyspark import daemon
    from pyspark import worker as worker_module

    # Spark 4.0 imports the function with the daemon, 4.3 with each task.
    owner, name = (daemon, "worker_main") if hasattr(daemon, "worker_main") else (worker_module, "main")
    run, work = daemon.worker, getattr(owner, name)
    connection: socket.socket | None = None

    def worker(sock: socket.socket, authenticated: bool) -> int:
        nonlocal connection
        tcp = sock.family != socket.AF_UNIX
        if tcp:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = sock if tcp and authenticated else None  # the reader of the first task has been used before
        return run(sock, authenticated)

    def worker_main(infile: io.BufferedReader, outfile: io.BufferedWriter) -> None:
        if connection is not None:
            infile = io.BufferedReader(_Acknowledging(connection), _BUFFER_BYTES)
        work(infile, outfile)

    daemon.worker = worker
    setattr(owner, name, worker_main)


def _keep_modules() -> None:
    """Let workers exclude from garbage collection what the modules made that a task imported.

    PySpark collects garbage after every task. Measured: a fourteenth of a flow's CPU went into looking through the
    objects of compiled code again.
    """
    from pyspark import daemon

    run, known = daemon.worker, 0

    def worker(sock: socket.socket, authenticated: bool) -> int:
        nonlocal known
        code = run(sock, authenticated)
        if len(sys.modules) != known:
            gc.collect()
            gc.freeze()
            known = len(sys.modules)
        return code

    daemon.worker = worker


def warm_up() -> None:
    """Import what every worker needs."""
    from_package()
    zipimport.zipimporter.invalidate_caches = _do_nothing  # type: ignore[method-assign,assignment]

    import polars  # noqa: ICN001, F401
    import pyarrow  # noqa: ICN001, F401
    import pyspark.daemon
    import pyspark.worker  # noqa: F401

    import aggregations.engine.columnar
    import aggregations.engine.fetch
    import aggregations.engine.messages
    import aggregations.spark.tasks  # noqa: F401


def serve() -> None:
    """Fork workers until Spark closes the daemon."""
    from pyspark import daemon

    from aggregations.spark import residents

    gc.collect()
    gc.freeze()  # existing objects stay shared between the forks
    residents.supervise(load)
    _answer_at_once()
    _keep_modules()
    daemon.manager()


def main() -> None:
    """Run the daemon until Spark closes it."""
    warm_up()
    serve()


if __name__ == "__main__":
    main()

"""Python that was started before Spark needs it, from which Spark's Python processes are forked.

Spark starts Python for its daemon of workers and, for a stream whose source is written in Python, four times more: to look
for sources, to make one, to plan its reading, and to run it. Each would import PySpark anew, which takes a second. So the
process that starts the JVM starts a server as well, which imports while the JVM starts, and Spark gets a launcher for
Python's executable (`aggregations.spark.launcher`). That asks the server for a fork, and becomes Python itself if it gets none.

Compiled code is loaded in a second server, forked from the first one, for Spark's daemon of workers alone: on a machine's
first run it takes half a minute, and the other processes must not wait for it.
"""

import gc
import json
import os
import resource
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from aggregations.spark.daemon import from_package, own_archive
from aggregations.spark.launcher import SIZE, STREAMS
from aggregations.spark.sockets import listen, socket_directory

DAEMON: Final = "aggregations.spark.daemon"
"""The module that Spark runs for its daemon of workers."""
_ANY: Final = "any"
_LAUNCHER: Final = "python"
_LOOK_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.05
_KILLED: Final = 128
"""Exit code of a process that a signal ended, less the signal, as shells have it."""
# What Python and its modules read when they start. Spark sets these for each of its processes.
_READ_AT_START: Final = (
    *("PYTHON", "POLARS_", "OMP_", "OPENBLAS_", "MKL_", "NUMBA_", "ARROW_", "MALLOC_", "LD_", "DYLD_", "LANG", "LC_"),
    "HEADWATER_CACHE",
)
_SPARKS_OWN: Final = ("PYTHONPATH", "PYTHON_")


class PythonAhead:
    """The starting process's side: servers that end with this process.

    Args:
        environment: Environment variables of Spark's Python workers.

    Attributes:
        executable: The launcher: what Spark shall take for Python.
        process: The server's process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._directory, lock = socket_directory("headwater-python-")
        self._in_use: int | None = lock
        launcher = Path(__file__).with_name("launcher.py")
        command = shlex.join([sys.executable, "-IS", str(launcher), str(self._directory)])
        executable = self._directory / _LAUNCHER
        executable.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        executable.chmod(0o700)
        self.executable = str(executable)
        with listen(self._directory / _ANY) as first, listen(self._directory / DAEMON) as second:
            listeners = [first.fileno(), second.fileno()]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "aggregations.spark.python_ahead", *map(str, listeners), str(self._directory)],
                stdin=subprocess.PIPE,
                stdout=2,
                env=dict(environment),
                pass_fds=listeners,
                process_group=0,
            )

    def end(self) -> None:
        """End it. What was forked ends when Spark closes its streams."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._in_use is not None:
            os.close(self._in_use)
            self._in_use = None


class _Server:
    """Forks what launchers ask for.

    Args:
        listener: Where they ask.
        ends: Whether this process shall end, asked about once a second.
        watched: File descriptors at whose end that is asked at once.
    """

    def __init__(self, listener: socket.socket, ends: Callable[[], bool], watched: Sequence[int] = ()) -> None:
        self._listener = listener
        self._ends = ends
        self._watched = watched
        self._path = sys.path[1:]
        self._started = _at_start(os.environ)
        self._woken, self._wakes = socket.socketpair()
        self._forks: dict[int, socket.socket] = {}
        """Connections of launchers by the process ids of their forks."""

    def serve(self) -> None:
        """Answer until this process shall end."""
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.collect()
        gc.freeze()  # existing objects stay shared between the forks
        while not self._ends():
            channels = {channel.fileno(): pid for pid, channel in self._forks.items()}
            poll = select.poll()  # select takes no numbers above 1023
            for number in (self._listener.fileno(), self._woken.fileno(), *self._watched, *channels):
                poll.register(number, select.POLLIN)
            ready = {number for number, _ in poll.poll(_LOOK_SECONDS * 1000)}
            with suppress(BlockingIOError):
                self._woken.recv(4096)
            for number in ready & channels.keys():  # Spark has ended the launcher
                with suppress(ProcessLookupError):
                    os.kill(channels[number], signal.SIGTERM)
                self._forks.pop(channels[number]).close()
            self._reap()
            if self._listener.fileno() in ready:
                try:
                    self._answer()
                except Exception:  # of one launcher, which becomes Python itself
                    traceback.print_exc()
                    time.sleep(_PAUSE_SECONDS)

    def _answer(self) -> None:
        channel, _ = self._listener.accept()
        with ExitStack() as failed:
            failed.callback(channel.close)
            channel.settimeout(_LOOK_SECONDS)
            size, streams, _, _ = socket.recv_fds(channel, SIZE.size, len(STREAMS))
            with ExitStack() as received:
                for stream in streams:
                    received.callback(os.close, stream)
                if len(size) != SIZE.size or len(streams) != len(STREAMS):
                    return  # the launcher has ended
                with channel.makefile("rb") as reader:
                    about = json.loads(reader.read(*SIZE.unpack(size)))
                if not self._fits(about["environment"]):
                    return
                if (pid := os.fork()) == 0:
                    self._become(about, streams, channel)
            channel.settimeout(None)
            try:
                channel.sendall(b"1")
            except OSError:  # nobody waits for it any more
                os.kill(pid, signal.SIGKILL)
                return
            self._forks[pid] = channel
            failed.pop_all()

    def _fits(self, environment: Mapping[str, str]) -> bool:
        """Whether Python with these variables would be as this process is."""
        given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        archives = [path for path in given if path.endswith((".zip", ".jar"))]
        foreign = [path for path in archives if path.endswith("pyspark.zip") and path != str(own_archive())]
        directories = [path for path in given if path not in archives]
        return (
            _at_start(environment).items()
            <= self._started.items()  # other variables may make modules another behaviour
            and not foreign
            and {*map(os.path.abspath, directories)} <= {*map(os.path.abspath, self._path)}
        )

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if channel := self._forks.pop(ended[0], None):
                    with channel, suppress(OSError):
                        code = os.waitstatus_to_exitcode(ended[1])
                        channel.sendall(SIZE.pack(code if code >= 0 else _KILLED - code))

    def _become(self, about: Mapping[str, Any], streams: Sequence[int], channel: socket.socket) -> NoReturn:
        """Run a module as `python -m` does, in a fork."""
        code: Any = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for stream, number in zip(streams, STREAMS, strict=True):
                os.dup2(stream, number)
                os.close(stream)
            for its in (self._listener, self._woken, self._wakes, channel, *self._forks.values()):
                its.close()
            os.environ.clear()
            os.environ.update(about["environment"])
            time.tzset()
            with suppress(OSError, ValueError):  # more than this process may set
                resource.setrlimit(resource.RLIMIT_NOFILE, about["files"])
            os.chdir(about["directory"])
            module, *arguments = about["arguments"]
            given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
            sys.path[:] = dict.fromkeys([about["directory"], *given, *self._path])
            from_package()
            sys.argv[1:] = arguments
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as error:
            code = error.code
            if not isinstance(code, int | None):
                sys.stderr.write(f"{code}\n")
        except BaseException:
            traceback.print_exc()
        finally:
            for output in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    output.flush()
            os._exit(code if isinstance(code, int) else int(code is not None))


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_START) and not name.startswith(_SPARKS_OWN)
    }


def _import_planning() -> None:
    """Import what Spark runs for a source that is written in Python."""
    import aggregations.spark.source  # noqa: F401

    for name in (
        "pyspark.sql.streaming.python_streaming_source_runner",
        "pyspark.sql.worker.create_data_source",
        "pyspark.sql.worker.lookup_data_sources",
        "pyspark.sql.worker.plan_data_source_read",
    ):
        with suppress(ImportError):  # of another Spark
            __import__(name)


def main() -> None:
    """Import, and serve until the process that started this one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from aggregations.spark import daemon, residents

    first, second = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    daemon.warm_up()
    parent = os.getpid()

    def serve_daemons() -> None:
        first.close()
        daemon.load()
        _Server(second, lambda: os.getppid() != parent).serve()

    residents.fork_child(signal.SIGKILL, serve_daemons)
    second.close()
    _import_planning()
    _Server(first, _is_deserted, watched=[0]).serve()
    shutil.rmtree(sys.argv[3], ignore_errors=True)


def _is_deserted() -> bool:
    """Whether the process that started this one has ended, and so closed this one's standard input."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return bool(poll.poll(0))


if __name__ == "__main__":
    main()

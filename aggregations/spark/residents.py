"""Processes that stay on an executor from batch to batch, one per slot: they keep consumers and connections.

Spark gives a task to any of its Python workers, and ends workers that are idle. A consumer in a worker would therefore
seek in every batch and lose what it has fetched ahead. So workers pass the tasks that read to residents: the resident
of a slot keeps its consumer, which fetches ahead while the batch before is persisted and committed.

Spark's Python daemon starts a supervisor before it forks its first worker, and the supervisor forks residents when they
are first asked for, or again after they ended. None of them has threads or clients when it forks: librdkafka does not
survive a fork. Supervisor and residents end with the daemon.
"""

import ctypes
import importlib
import mmap
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NoReturn

from aggregations.engine.idle import keepers
from aggregations.spark.sockets import listen, socket_directory

_PR_SET_PDEATHSIG: Final = 1  # of prctl(2)
_LOOK_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.02
IDLE_SECONDS: Final = 300.0
"""Seconds without a call after which a resident ends: on a cluster a slot may have gone to another executor."""
_SUPERVISOR: Final = "supervisor"
_MALLOPT: Final = {-1: 256 << 20, -2: 32 << 20, -3: 32 << 20}
"""Parameters of mallopt(3): M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, which is at most 32 MB; in bytes."""

_directory: Path | None = None
"""Where the supervisor of this process's daemon listens; None in a process that has none."""
_daemon = 0
"""Process id of Spark's daemon, in it and in its workers."""
_resident = False
_parent = 0
"""Process id of the parent, in a supervisor and in a resident."""
_PREFIX: Final = "headwater-residents-"
_PID: Final = struct.Struct("q")


class ResidentLostError(RuntimeError):
    """A resident process ended during a call."""


def supervise(prepare: Callable[[], None] = lambda: None) -> None:
    """Start a supervisor for the workers that this process will fork. Call it before any thread or client exists.

    Args:
        prepare: Called by the supervisor before it forks a resident. It may import modules that residents share, but
            start no threads and no clients.
    """
    global _daemon, _directory
    directory, lock = socket_directory(_PREFIX)  # the lock is held until the last process that inherits it has ended
    with listen(directory / _SUPERVISOR) as listener:
        fork_child(signal.SIGTERM, lambda: _supervise(listener, directory, prepare))
    os.close(lock)
    _daemon, _directory = os.getpid(), directory


def is_resident() -> bool:
    """Whether this process is a resident: calls of its slot come to it again."""
    return _resident


def call(slot: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in the resident of a slot; in this process if it has no supervisor.

    Args:
        slot: Number of the slot. Calls of one slot run one after the other.
        function: A function of a module.
        arguments: Its arguments; like the result, they are pickled.

    Raises:
        ResidentLostError: The resident ended meanwhile, and the next call starts another. Or the supervisor ended; then
            Spark's daemon is ended as well, and Spark starts both again.
        Exception: What the function raised.
    """
    if _directory is None:
        return function(*arguments)
    try:
        request = _dumps((os.getpid(), sys.path, _dumps((function, arguments))))
        answer = _through(slot, _directory / _SUPERVISOR, request)
    except (OSError, EOFError) as error:
        raise ResidentLostError(f"the resident process of slot {slot} ended ({type(error).__name__})") from error
    succeeded, result = pickle.loads(answer)  # noqa: S301 - of this executor
    if not succeeded:
        raise result
    return result


def _dumps(what: object) -> bytes:
    return pickle.dumps(what, pickle.HIGHEST_PROTOCOL)


def _through(slot: int, supervisor: Path, request: bytes) -> bytes:
    """Send a request to the resident of a slot and return its answer."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            connection = _connect(supervisor)
        except (FileNotFoundError, ConnectionRefusedError):
            if os.getppid() != _daemon:  # it was killed: Spark shall use this worker no more
                os._exit(1)
            os.kill(_daemon, signal.SIGTERM)
            raise
        with connection:
            connection.send_bytes(_dumps(slot))
            address = pickle.loads(connection.recv_bytes())  # noqa: S301 - of this executor
        try:
            connection = _connect(address)
        except (FileNotFoundError, ConnectionRefusedError):  # it just ended because it was idle
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)
            continue
        with connection:
            connection.send_bytes(request)
            return connection.recv_bytes()


def _connect(address: Path) -> "Connection[Any, Any]":
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.connect(str(address))
        return Connection(channel.detach())


class _Resident:
    """A resident as its supervisor sees it.

    Attributes:
        address: Where it listens.
        pid: Its process id.
    """

    def __init__(self, address: Path) -> None:
        self.address = address
        self.pid = 0
        self._caller = mmap.mmap(-1, _PID.size)  # shared with the resident

    def called(self, caller: int) -> None:
        """Note in the resident for which process it works; 0 for none."""
        _PID.pack_into(self._caller, 0, caller)

    def is_deserted(self) -> bool:
        """Whether it works for a process that has ended."""
        (caller,) = _PID.unpack_from(self._caller)
        try:
            if caller:
                os.kill(caller, 0)
        except ProcessLookupError:
            return True
        return False


def _supervise(listener: socket.socket, directory: Path, prepare: Callable[[], None]) -> NoReturn:
    """Tell workers where the resident of a slot listens; fork it if it does not run.

    A resident whose caller has ended is ended: nobody else would stop its work, which may never end.
    """
    running: dict[int, _Resident] = {}
    begun: list[tuple[_Resident, socket.socket]] = []
    started = 0

    def reap() -> None:
        for resident in running.values():
            if resident.is_deserted():
                os.kill(resident.pid, signal.SIGKILL)
                os.waitid(os.P_PID, resident.pid, os.WEXITED | os.WNOWAIT)
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                for gone in [slot for slot, one in running.items() if one.pid == ended]:
                    running.pop(gone).address.unlink(missing_ok=True)

    def address(request: bytes) -> bytes:
        nonlocal started
        slot = pickle.loads(request)  # noqa: S301 - of this executor
        reap()
        if slot not in running:
            started += 1
            running[slot] = _Resident(directory / str(started))
            begun.append((running[slot], listen(running[slot].address)))
        return _dumps(running[slot].address)

    def fork() -> None:
        """Fork what was asked for, after the answer: a resident has no connection of its supervisor's."""
        while begun:
            resident, its = begun.pop()
            with its:
                resident.pid = fork_child(signal.SIGKILL, partial(_reside, resident, its, listener))

    try:
        prepare()
        _serve(listener, address, fork, reap)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _reside(resident: _Resident, listener: socket.socket, supervisor: socket.socket) -> NoReturn:
    global _resident
    _resident = True
    supervisor.close()
    keep_freed_memory()
    called = time.monotonic()

    def run(request: bytes) -> bytes:
        nonlocal called
        caller, path, what = pickle.loads(request)  # noqa: S301 - of this executor
        resident.called(caller)
        try:
            return _run(path, what)
        finally:
            resident.called(0)
            called = time.monotonic()

    def look() -> None:
        kept = [keeps() for keeps in keepers]
        if not any(kept) and time.monotonic() - called > IDLE_SECONDS:
            sys.exit()

    _serve(listener, run, look=look)


def keep_freed_memory() -> None:
    """Keep up to 256 MB of freed memory in this process, where the C library can (glibc): the next batch needs it again.

    By default, each batch has the system give and clear its pages anew. Measured: a twentieth of the CPU per event.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for parameter, value in _MALLOPT.items():
            mallopt(parameter, value)


def _run(path: Sequence[str], what: bytes) -> bytes:
    """Call a function and return whether it succeeded, and its result or error."""
    if missing := [place for place in path if place not in sys.path]:
        sys.path += missing  # modules that Spark brought here after this process was forked
        importlib.invalidate_caches()
    try:
        function, arguments = pickle.loads(what)  # noqa: S301 - of this executor
        return _dumps((True, function(*arguments)))
    except Exception as error:
        with suppress(Exception):
            return _dumps((False, error))
        return _dumps((False, RuntimeError(f"{type(error).__name__}, which cannot be pickled")))


def _serve(
    listener: socket.socket,
    answer: Callable[[bytes], bytes],
    then: Callable[[], None] = lambda: None,
    look: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Answer one request after the other, until the parent has ended.

    Args:
        listener: Where requests come.
        answer: Makes the answer.
        then: Called after each answer.
        look: Called about once a second between two requests.
    """
    looked = time.monotonic()
    while True:
        if time.monotonic() - looked >= _LOOK_SECONDS:
            looked = time.monotonic()
            if os.getppid() != _parent:
                sys.exit()
            look()
        listener.settimeout(max(looked + _LOOK_SECONDS - time.monotonic(), 0.0) or _PAUSE_SECONDS)
        try:
            channel, _ = listener.accept()
        except TimeoutError:
            continue
        channel.setblocking(True)
        with suppress(OSError, EOFError), Connection(channel.detach()) as connection:
            connection.send_bytes(answer(connection.recv_bytes()))
        then()


def fork_child(end: signal.Signals, run: Callable[[], object]) -> int:
    """Fork a process that runs a function, and then ends without anything of this process's own cleaning up.

    Args:
        end: Signal that it gets when this process ends.
        run: The function. The process reads and writes nothing of Spark's.

    Returns:
        Its process id.
    """
    global _parent
    parent = os.getpid()
    if (pid := os.fork()) != 0:
        return pid
    try:
        _parent = parent
        os.setpgid(0, 0)
        for number in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, end)
        if os.getppid() == parent:
            run()
    finally:
        os._exit(0)

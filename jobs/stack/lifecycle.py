"""Start, find and stop the servers of a stack."""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from jobs.stack import cassandra as cassandra_server
from jobs.stack import kafka as kafka_server
from jobs.stack import ports, process
from jobs.stack import redis as redis_server
from jobs.stack.server import Launch, OnStep, Prepare
from jobs.stack.state import ServerState, StackError, StackState, unusable

DEFAULT_ROOT: Final = Path(".headwater/stack")
_SERVERS: Final[dict[str, Prepare]] = {
    "kafka": kafka_server.prepare,
    "redis": redis_server.prepare,
    "cassandra": cassandra_server.prepare,
}
_POLL_SECONDS: Final = 0.1
_STOP_SECONDS: Final = 20.0
_SHOWN_LINES: Final = 3  # of a log


def up(
    root: Path,
    *,
    kafka: bool = True,
    redis: bool = False,
    cassandra: bool = False,
    heap_mb: int = 512,
    progress: OnStep | None = None,
) -> StackState:
    """Start the requested servers that are not running; return when all of them accept requests.

    They continue after this process ends. Data and ports are kept in `root`. Several
    processes may call this at once; one starts the servers and all return them.

    Args:
        root: The stack's directory; created if it does not exist.
        kafka: Whether to start a Kafka broker.
        redis: Whether to start a Redis server (Valkey if no redis-server is installed).
        cassandra: Whether to start a Cassandra node.
        heap_mb: Java heap of each Java server, in MiB.
        progress: Called with each step that takes time.

    Returns:
        All servers that run in `root`.

    Raises:
        StackError: A server did not start: the text quotes its log, and the server is stopped. Or `root` cannot be used.
        JarsUnavailable: Its jars could not be downloaded.
        JavaUnavailable: There is no Java 17 or newer.
    """
    say = progress or (lambda _line: None)
    root = root.absolute()
    wanted = [name for name, asked in (("kafka", kafka), ("redis", redis), ("cassandra", cassandra)) if asked]
    with _locked(root):
        state = StackState.load(root)
        launched: list[tuple[ServerState, Launch]] = []
        try:
            for name in wanted:
                if state.find(name) is None:
                    home = root / name
                    launch = _prepared(name, home, heap_mb, say)
                    # Whatever ends this process from here on finds the server in the list.
                    launched.append((server := _started(name, home, launch), launch))
                    state = state.having(server)
                    state.save()
            for server, launch in launched:
                _wait(server, launch)
                say(f"{server.name}: ready at {server.address}")
        except BaseException:
            for server, _ in launched:
                process.stop(server.pid, server.started, _STOP_SECONDS)
            with suppress(OSError):  # a file that still names them is harmless: they do not run
                StackState.load(root).save()
            raise
        return state


def down(root: Path) -> list[str]:
    """Stop every server that was started in `root` and return their names; data and ports are kept.

    Raises:
        StackError: A server did not end, not even by SIGKILL, or is another user's.
    """
    root = root.absolute()
    if not root.is_dir():
        return []
    with _locked(root):
        state = StackState.load(root)
        for server in reversed(state.servers):
            try:
                process.stop(server.pid, server.started, _STOP_SECONDS)
            except PermissionError as error:
                raise StackError(
                    f"{server.name} (pid {server.pid}) runs as another user: stop it as that user"
                ) from error
            if server.alive:
                raise StackError(f"{server.name} (pid {server.pid}) does not end: see {server.log}")
        StackState(root).save()
        return [server.name for server in state.servers]


def status(root: Path) -> StackState | None:
    """Return the servers that run in `root`; None if there are none."""
    state = StackState.load(root.absolute())
    return state if state.servers else None


@contextmanager
def ephemeral(
    *, kafka: bool = True, redis: bool = False, cassandra: bool = False, heap_mb: int = 512
) -> Iterator[StackState]:
    """A stack in a temporary directory. It is stopped and deleted at the end of the `with` block."""
    root = Path(tempfile.mkdtemp(prefix="headwater-stack-"))
    try:
        yield up(root, kafka=kafka, redis=redis, cassandra=cassandra, heap_mb=heap_mb)
    finally:
        down(root)
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Let one process at a time work on the stack in `root`, which is created if it does not exist."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise unusable(root, error) from error


def _prepared(name: str, home: Path, heap_mb: int, say: OnStep) -> Launch:
    home.mkdir(exist_ok=True)
    launch = _SERVERS[name](home, heap_mb=heap_mb, progress=lambda line: say(f"{name}: {line}"))
    (home / f"{name}.log").unlink(missing_ok=True)
    say(f"{name}: starting")
    return launch


def _started(name: str, home: Path, launch: Launch) -> ServerState:
    log = home / f"{name}.log"
    pid = process.spawn(launch.command, log, home, launch.environment)
    return ServerState(name, pid, process.start_of(pid) or "", launch.address, str(log))


def _wait(server: ServerState, launch: Launch) -> None:
    deadline = time.monotonic() + launch.ready_seconds
    while not launch.is_ready():
        if not server.alive:
            held = ports.conflicts(Path(server.log).parent)
            raise StackError(f"{server.name} ended while it started: {_said(server)}{held}")
        if time.monotonic() > deadline:
            raise StackError(f"{server.name} is not ready after {launch.ready_seconds:.0f} s: {_said(server)}")
        time.sleep(_POLL_SECONDS)
    if not server.alive:
        held = ports.conflicts(Path(server.log).parent)
        raise StackError(f"something else answers at {server.address}, and {server.name} ended: {_said(server)}{held}")


def _said(server: ServerState) -> str:
    """The last errors in its log, or else its last lines, and the path of the log."""
    lines = Path(server.log).read_text(errors="replace").splitlines() if Path(server.log).exists() else []
    errors = [line for line in lines if any(word in line for word in ("ERROR", "FATAL", "Exception", "Error:"))]
    shown = lines if len(lines) <= _SHOWN_LINES else (errors or lines)[-_SHOWN_LINES:]
    return f"{' | '.join(shown) or 'it wrote nothing'} (log: {server.log})"

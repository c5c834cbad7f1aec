"""Free ports on loopback, remembered so that a server keeps its address from one start to the next."""

import json
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"
_FILE: Final = "ports.json"
_RANGE: Final = range(20_000, 32_000)
"""Below the range from which systems give ports to outgoing connections, so that none of those is in the way."""


def remembered(home: Path, names: Sequence[str]) -> dict[str, int]:
    """Return a free port per name: the one that `home` remembers, else a new one."""
    try:
        ports = {str(name): int(port) for name, port in json.loads((home / _FILE).read_text()).items()}
    except (FileNotFoundError, ValueError, AttributeError):
        ports = {}
    ports = {name: port for name, port in ports.items() if name in names and is_free(port)}
    for name in names:
        while name not in ports:
            port = random.choice(_RANGE)
            if port not in ports.values() and is_free(port):
                ports[name] = port
    (home / _FILE).write_text(json.dumps(ports))
    return ports


def is_free(port: int) -> bool:
    """Whether a server could listen on that port of loopback now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closed one's leftovers are fine
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def ask(port: int, request: bytes, size: int) -> bytes:
    """Send `request` to that port and return up to `size` bytes of the answer, none when there is no answer."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=2) as connection:
            connection.sendall(request)
            return connection.recv(size)
    except OSError:
        return b""

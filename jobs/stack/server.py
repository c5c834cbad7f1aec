"""How the stack starts a server, and when the server is ready."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

OnStep = Callable[[str], None]
"""Called with a line for each step that takes time."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one server whose files are prepared.

    Attributes:
        command: Program and arguments; it stays in the foreground.
        address: Its address for clients.
        is_ready: Returns whether it accepts requests.
        environment: Variables to add to those of this process.
        ready_seconds: Maximum seconds until it is ready, on a slow and busy machine.
        stop_seconds: Maximum seconds until it ends after SIGTERM.
    """

    command: tuple[str, ...]
    address: str
    is_ready: Callable[[], bool]
    environment: dict[str, str] = field(default_factory=dict)
    ready_seconds: float = 120.0
    stop_seconds: float = 20.0


class Prepare(Protocol):
    """Function of a server's module: prepares its directory and returns how to start it."""

    def __call__(self, home: Path, *, heap_mb: int, progress: OnStep) -> Launch: ...

"""What a server's module tells the stack: how to start it, and when it is ready."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

OnStep = Callable[[str], None]
"""Called with one plain line for each thing that a person waits for."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start one server, with everything on disk already prepared.

    Attributes:
        command: What to run; it stays in the foreground.
        address: Where clients will reach it.
        is_ready: Asks it once whether it serves.
        environment: Added to this process's own.
        ready_seconds: How long a start may take on a slow, busy machine.
        stop_seconds: How long it may take to end after SIGTERM.
    """

    command: tuple[str, ...]
    address: str
    is_ready: Callable[[], bool]
    environment: dict[str, str] = field(default_factory=dict)
    ready_seconds: float = 120.0
    stop_seconds: float = 20.0


class Prepare(Protocol):
    """A server's module: prepares its directory, whose content survives stops, and says how to start."""

    def __call__(self, home: Path, *, heap_mb: int, progress: OnStep) -> Launch: ...

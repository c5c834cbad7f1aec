"""The commands that start and stop local servers, as in `command_table`."""

from pathlib import Path

from jobs.stack import StackState
from tests.support.command_table import JSON, Command, Option

_STATE = StackState(Path("local"))

STACK = {
    "headwater stack up": Command(
        "stack up",
        "jobs.stack.up",
        _STATE,
        {
            "kafka": Option("--no-kafka --redis", {"kafka": False, "redis": True}),
            "redis": Option("--redis", {"redis": True}),
            "cassandra": Option("--cassandra", {"cassandra": True}),
            "heap": Option("--heap 256", {"heap_mb": 256}),
            "root": Option("--root other", {"root": Path("other")}),
            "json": JSON,
        },
    ),
    "headwater stack down": Command(
        "stack down",
        "jobs.stack.down",
        [],
        {"root": Option("--root other", {"root": Path("other")}), "json": JSON},
    ),
    "headwater stack status": Command(
        "stack status",
        "jobs.stack.status",
        _STATE,
        {"root": Option("--root other", {"root": Path("other")}), "json": JSON},
    ),
}

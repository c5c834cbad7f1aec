"""A local Kafka, Redis and Cassandra as child processes: no Docker, no root, loopback only."""

from jobs.stack.lifecycle import DEFAULT_ROOT, down, ephemeral, status, up
from jobs.stack.state import ServerState, StackError, StackState

__all__ = ["DEFAULT_ROOT", "ServerState", "StackError", "StackState", "down", "ephemeral", "status", "up"]

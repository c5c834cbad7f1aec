"""A local Kafka, Redis and Cassandra on loopback, as ordinary processes: without Docker and root."""

from jobs.stack.lifecycle import DEFAULT_ROOT, down, ephemeral, status, up
from jobs.stack.state import ServerState, StackError, StackState

__all__ = ["DEFAULT_ROOT", "ServerState", "StackError", "StackState", "down", "ephemeral", "status", "up"]

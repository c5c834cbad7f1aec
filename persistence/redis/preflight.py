"""Whether a server keeps what it is given."""

from dataclasses import dataclass

from redis import exceptions as redis

from persistence.errors import Terminal
from persistence.redis.nodes import Node
from persistence.redis.settings import Settings


@dataclass(frozen=True, slots=True)
class Facts:
    """What one server says of itself.

    Attributes:
        server: Name and version.
        role: master or slave, in its own words.
        aof: It writes an append-only file.
        fsync: always, everysec or no; empty when it does not say.
        policy: What it throws out when memory is full.
    """

    server: str
    role: str
    aof: bool
    fsync: str
    policy: str

    @property
    def synced(self) -> bool:
        """Whether an answer means that the write is on disk."""
        return self.aof and self.fsync == "always"


def facts_of(node: Node) -> Facts:
    """Ask a server.

    Raises:
        redis.RedisError: It does not answer, or may not be asked.
    """
    info, fsync = node.exchange([("INFO",), ("CONFIG", "GET", "appendfsync")])
    if isinstance(info, redis.RedisError):
        raise info
    said = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    name = said.get("server_name") or "redis"
    return Facts(
        server=f"{name} {said.get('valkey_version') or said.get('redis_version', '')}".strip(),
        role=said.get("role", ""),
        aof=said.get("aof_enabled") == "1",
        # Managed servers refuse CONFIG: then nothing is known of it.
        fsync=fsync[1].decode() if isinstance(fsync, list) and len(fsync) > 1 else "",
        policy=said.get("maxmemory_policy", ""),
    )


def check(facts: Facts, settings: Settings) -> None:
    """Refuse a server that may lose states by itself.

    Raises:
        Terminal: It is a replica, may evict states, or keeps no log, and the settings do not accept that.
    """
    if facts.role == "slave":
        raise Terminal(
            f"the server ({facts.server}) is a replica",
            "Name the primary, or use redis+sentinel:// or redis+cluster://",
        )
    # volatile-* throws out only keys that expire, which ours never do.
    if facts.policy.startswith("allkeys") and "eviction" not in settings.accept:
        raise Terminal(
            f"the server ({facts.server}) throws out states when its memory is full (maxmemory-policy {facts.policy})",
            "Set `maxmemory-policy noeviction`, or accept it with ?accept=eviction",
        )
    if not facts.aof and "no-aof" not in settings.accept:
        raise Terminal(
            f"the server ({facts.server}) keeps no append-only file: a crash loses what it acknowledged",
            "Set `appendonly yes` and `appendfsync always`, or accept it with ?accept=no-aof",
        )

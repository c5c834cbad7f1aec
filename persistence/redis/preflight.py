"""Checks whether a server keeps acknowledged writes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from redis import exceptions as redis

from persistence.findings import Finding
from persistence.redis.errors import meaning_of
from persistence.redis.nodes import LOST, Nodes, Server, connect
from persistence.redis.settings import Endpoint, RedisSettings, read_place, read_settings


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that one server reports about itself.

    Attributes:
        server: Name and version.
        role: master or slave, as reported.
        aof: It writes an append-only file.
        fsync: always, everysec or no; empty if it is not reported.
        policy: Its maxmemory-policy.
        replicas: Number of connected replicas.
    """

    server: str
    role: str
    aof: bool
    fsync: str
    policy: str
    replicas: int = 0

    @property
    def synced(self) -> bool:
        """Whether an acknowledged write is on disk."""
        return self.aof and self.fsync == "always"


def preflight(url: str) -> list[Finding]:
    """Inspect the servers at `url` and return what should be changed before a flow runs there; nothing is written.

    Raises:
        Transient: A server cannot be reached.
        Terminal: A server refuses to answer, or the URL is invalid.
    """
    place, settings = read_place(url), read_settings(url)
    nodes = connect(place, settings)
    try:
        found = [finding for facts in facts_of(nodes, settings) for finding in findings(facts, place, settings)]
        # Risks that the URL accepts are reported, not refused.
        return [replace(one, unsafe=one.unsafe and one.risk not in settings.accept) for one in found]
    finally:
        nodes.close()


def facts_of(nodes: Nodes, settings: RedisSettings) -> list[Facts]:
    """Facts that each primary reports.

    Raises:
        Transient: A server cannot be reached.
        Terminal: A server refuses to answer.
    """
    try:
        return [_ask(node) for node in nodes.primaries()]
    except (*LOST, redis.RedisError) as error:
        raise meaning_of(error).error(settings.url) from None


def is_durable(facts: Facts, settings: RedisSettings) -> bool:
    """Whether the writes that a server acknowledges are on its disk."""
    waited = settings.waitaof is not None and settings.waitaof[0] > 0
    # With everysec, Valkey answers WAITAOF without an fsync.
    return facts.synced or (facts.aof and waited and not facts.server.startswith("valkey"))


def findings(facts: Facts, place: Endpoint, settings: RedisSettings) -> Iterator[Finding]:
    """Findings about one server, given the settings of a URL."""
    who = f"the server {settings.url} ({facts.server})"
    if facts.role == "slave":
        yield Finding(
            "replica",
            f"{who} is a replica",
            "Use the primary's address, or redis+sentinel:// or redis+cluster://",
            unsafe=True,
        )
    # volatile-* evicts only keys with an expiry, and headwater sets none.
    if facts.policy.startswith("allkeys"):
        yield Finding(
            "eviction",
            f"{who} evicts states when its memory is full (maxmemory-policy {facts.policy})",
            "Set `maxmemory-policy noeviction`",
            unsafe=True,
        )
    if not facts.aof:
        yield Finding(
            "no-aof",
            f"{who} has no append-only file: a crash loses acknowledged writes",
            "Set `appendonly yes` and `appendfsync always`",
            unsafe=True,
        )
    elif not is_durable(facts, settings):
        shards = place.kind == "cluster"
        yield Finding(
            "fsync",
            f"{who} acknowledges a write before it is on disk (appendfsync {facts.fsync or 'unknown'}): a crash "
            "of its machine loses the last writes, and "
            + (
                "the other nodes of the cluster keep theirs"
                if shards
                else "stages in other stores must not be ahead of them"
            ),
            "Set `appendfsync always`" + ("" if shards else ", or keep all stages of a flow in this one server"),
            unsafe=shards,
        )
    if facts.replicas and not settings.wait and not (settings.waitaof and settings.waitaof[1]):
        yield Finding(
            "unwaited-replicas",
            f"{who} has {facts.replicas} replicas and acknowledges a write before any of them has it: a failover to a "
            "lagging replica loses acknowledged writes",
            "Add ?wait=1 to the URL, or a higher number if several replicas may be promoted",
            unsafe=True,
        )


def _ask(node: Server) -> Facts:
    info, fsync = node.exchange([("INFO",), ("CONFIG", "GET", "appendfsync")])
    if isinstance(info, redis.RedisError):
        raise info
    said = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    name = said.get("server_name") or "redis"
    return Facts(
        server=f"{name} {said.get('valkey_version') or said.get('redis_version', '')}".strip(),
        role=said.get("role", ""),
        aof=said.get("aof_enabled") == "1",
        # Managed servers refuse CONFIG; the settings are then unknown.
        fsync=fsync[1].decode() if isinstance(fsync, list) and len(fsync) > 1 else "",
        policy=said.get("maxmemory_policy", ""),
        replicas=int(said.get("connected_slaves", "0")),
    )

"""Checks before a flow runs whether a cluster can lose states."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from cassandra.query import SimpleStatement

from persistence.cassandra.client import Client
from persistence.cassandra.ddl import TABLES
from persistence.cassandra.driver import DRIVER_ERRORS
from persistence.cassandra.errors import translate
from persistence.cassandra.paxos import PAXOS_RISKS, SERIAL_READS, PaxosNode, of_paxos, unread
from persistence.cassandra.settings import TIMESTAMP, CassandraSettings
from persistence.errors import Transient
from persistence.findings import Finding

RISKS: Final = frozenset(
    {
        "no-commitlog",
        "expiring-states",
        "replication-1",
        "local-serial",
        "commitlog-periodic",
        "timestamp-mode",
        "hidden-settings",
        *PAXOS_RISKS,
    }
)
"""Risks that a cluster can have."""
_SETTINGS: Final = "SELECT name, value FROM system_views.settings WHERE name IN ({})"
_PROPERTIES: Final = "SELECT value FROM system_views.system_properties WHERE name = '{}'"
_VERSION: Final = "SELECT release_version FROM system.local"
_VIEWED: Final = (
    "commitlog_sync",
    "paxos_variant",
    "skip_paxos_repair_on_topology_change",
    "skip_paxos_repair_on_topology_change_keyspaces",
    "max_mutation_size",  # 4.1 and newer; 4.0 has it in KiB
    "max_mutation_size_in_kb",
    "batch_size_fail_threshold",
    "batch_size_fail_threshold_in_kb",
)
_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def preflight(url: str) -> list[Finding]:
    """Inspect the cluster at `url` and return what should be changed before a flow runs there; nothing is written.

    Raises:
        Transient: The cluster cannot be reached.
        Terminal: The keyspace or its tables are missing, the login was refused, or the URL is invalid.
    """
    settings = CassandraSettings.parse(url)
    client = Client(settings)
    try:
        cluster = client.live(None).cluster
        keyspace = cluster.metadata.keyspaces[settings.keyspace]
        return [
            *_of_keyspace(keyspace, settings),
            *_of_datacentres(cluster.metadata.all_hosts(), keyspace.replication_strategy, settings),
            *_of_nodes(nodes_of(client), settings),
            *_of_mode(settings),
        ]
    finally:
        client.close()


def commitlog_sync(client: Client) -> list[str]:
    """How each connected node syncs its commit log: `batch`, `group`, `periodic`, or `unknown`."""
    return [node.settings.get("commitlog_sync", "unknown") for node in nodes_of(client).values()]


def nodes_of(client: Client) -> dict[str, PaxosNode]:
    """What each connected node reports about itself, as far as it is relevant here."""
    names = ", ".join(f"'{name}'" for name in _VIEWED)
    found: dict[str, PaxosNode] = {}
    for host in client.live(None).session.get_pool_state():
        settings = _ask(client, host, _SETTINGS.format(names))
        properties = _ask(client, host, _PROPERTIES.format(SERIAL_READS))
        version = _ask(client, host, _VERSION)
        found[str(host.endpoint)] = PaxosNode(
            version=version[0][0] if version else "",
            settings={name: value for name, value in settings or [] if value is not None},
            hidden=not settings,
            serial_reads=None if properties is None else (properties[0][0] if properties else ""),
        )
    return found


def _ask(client: Client, host: Any, query: str) -> list[Any] | None:
    """The rows that one node returns about itself. None if it has no such table, or this user may not read it."""
    try:
        return list(client.live(None).session.execute(SimpleStatement(query), host=host))
    except DRIVER_ERRORS as error:
        translated = translate(error, client.settings.place)
        if isinstance(translated, Transient):
            raise translated from error
        return None


def _of_keyspace(keyspace: Any, settings: CassandraSettings) -> Iterator[Finding]:
    name = settings.keyspace
    if not keyspace.durable_writes:
        yield Finding(
            "no-commitlog",
            f"the keyspace {name} has durable_writes = false: acknowledged writes are only in memory",
            f"ALTER KEYSPACE {name} WITH durable_writes = true",
            unsafe=True,
        )
    for table in TABLES:
        lifetime = keyspace.tables[table].options.get("default_time_to_live")
        if lifetime:
            yield Finding(
                "expiring-states",
                f"rows of {name}.{table} expire after {lifetime} s, epochs and manifests included",
                f"ALTER TABLE {name}.{table} WITH default_time_to_live = 0",
                unsafe=True,
            )


def _of_datacentres(hosts: Any, strategy: Any, settings: CassandraSettings) -> Iterator[Finding]:
    name = settings.keyspace
    nodes = {host.datacenter for host in hosts}
    copies = _copies(strategy, nodes)
    for dc, count in sorted(copies.items()):
        if count < 3:
            yield Finding(
                f"replication-{count}",
                f"{name} has {count} {'copy' if count == 1 else 'copies'} of each state in {dc}: "
                + ("a lost disk loses states" if count == 1 else "a quorum needs both nodes of a state to be up"),
                f"ALTER KEYSPACE {name} with a replication of 3 in {dc}, then `nodetool repair`",
                unsafe=count == 1,
            )
    if settings.dc and not copies.get(settings.dc):
        yield Finding("empty-dc", f"{name} has no copy in the data centre {settings.dc}", "Choose one that has copies")
    if len(nodes) > 1 and not settings.dc:
        yield Finding(
            "any-dc",
            f"the cluster has {len(nodes)} data centres and the URL does not name the local one",
            f"Set ?dc= to one of {', '.join(sorted(nodes))}",
        )
    if len([dc for dc in nodes if copies.get(dc)]) > 1 and settings.serial_consistency == "local_serial":
        yield Finding(
            "local-serial",
            "transactions are serial within one data centre only, and several have copies: two runs in different data "
            "centres would not fence each other",
            "Run each flow in one data centre only, or set ?serial_consistency=serial&consistency=quorum",
            unsafe=True,
        )


def _of_nodes(nodes: Mapping[str, PaxosNode], settings: CassandraSettings) -> Iterator[Finding]:
    for name, node in sorted(nodes.items()):
        yield from of_paxos(name, node, settings.keyspace)
        if unknown := unread(node):
            yield Finding(
                "hidden-settings",
                f"this user, or this version of Cassandra ({node.version or 'unknown'}), does not show these settings of "
                f"{name}: {', '.join(unknown)}",
                "GRANT SELECT ON KEYSPACE system_views, or check the settings on the node and accept this risk",
                unsafe=True,
            )
        if node.settings.get("commitlog_sync") == "periodic":
            yield Finding(
                "commitlog-periodic",
                f"{name} writes its commit log to disk only periodically (commitlog_sync: periodic): if all "
                "copies of a state lose power, the writes acknowledged in the last seconds are lost",
                "Set commitlog_sync: group (and commitlog_sync_group_window: 5ms) in cassandra.yaml, restart the node",
                unsafe=True,
            )
        yield from _of_limits(name, node.settings, settings)


def _of_limits(node: str, values: Mapping[str, str], settings: CassandraSettings) -> Iterator[Finding]:
    batch = _bytes(values, "batch_size_fail_threshold")
    if batch is not None and settings.batch_bytes > batch:
        yield Finding(
            "batch-size",
            f"batches may have up to {settings.batch_bytes} bytes, and {node} has batch_size_fail_threshold {batch}",
            f"Set ?batch_bytes={batch} or less",
        )
    mutation = _bytes(values, "max_mutation_size")
    # A transaction stores its proposal in addition to the row, so a mutation contains the state twice.
    if mutation is not None and 2 * settings.max_value_bytes > mutation:
        yield Finding(
            "mutation-size",
            f"states may have up to {settings.max_value_bytes} bytes, and {node} accepts mutations of {mutation} bytes",
            f"Set ?max_value_bytes={mutation // 2} or less",
        )


def _of_mode(settings: CassandraSettings) -> Iterator[Finding]:
    if settings.mode == TIMESTAMP:
        yield Finding(
            "timestamp-mode",
            "mode=timestamp: a delayed run can still write for a moment after a newer run has taken over",
            "Use it only if a second run can never start; otherwise remove the option",
            unsafe=True,
        )


def _copies(strategy: Any, datacentres: set[str]) -> dict[str, int]:
    """Copies of each state per data centre; for a strategy without data centres, the same number in each."""
    per_dc = getattr(strategy, "dc_replication_factors", None)
    if per_dc is not None:
        return dict(per_dc)
    return dict.fromkeys(datacentres, int(getattr(strategy, "replication_factor", 0) or 0))


def _bytes(values: Mapping[str, str], name: str) -> int | None:
    """A size in the settings: `50KiB` under its name, or a number of KiB under its older name."""
    if (text := values.get(name)) is not None:
        for unit, factor in sorted(_UNITS.items(), key=lambda pair: -len(pair[0])):
            if text.endswith(unit):
                return int(text.removesuffix(unit)) * factor
    old = values.get(f"{name}_in_kb")
    return None if old is None else int(old) << 10

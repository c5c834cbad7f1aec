"""The tables. Only `headwater schema apply` creates them."""

from collections.abc import Callable
from typing import Any, Final

from persistence.cassandra.driver import DRIVER_ERRORS, connect, disconnect
from persistence.cassandra.errors import translate
from persistence.cassandra.settings import CassandraSettings, Replication
from persistence.cassandra.statements import Statements
from persistence.errors import Terminal

_KEYSPACE: Final = "CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = {replication} AND durable_writes = true"

_FLOW: Final = """\
CREATE TABLE IF NOT EXISTS {keyspace}.flow (
    flow text,
    generation int,
    stage text,
    epoch bigint STATIC,
    manifest text STATIC,
    buckets int,
    mode text,
    fenced boolean,
    indexed boolean,
    PRIMARY KEY ((flow, generation), stage)
) WITH comment = 'headwater: per flow and generation the installed epoch, the manifest and how each stage is laid out'"""

_STATE: Final = """\
CREATE TABLE IF NOT EXISTS {keyspace}.state (
    flow text,
    generation int,
    stage text,
    bucket int,
    key blob,
    fence bigint STATIC,
    mark bigint STATIC,
    downstream text STATIC,
    removed bigint STATIC,
    version bigint,
    epoch bigint,
    batch_number bigint,
    value blob,
    due bigint,
    PRIMARY KEY ((flow, generation, stage, bucket), key)
) WITH compaction = {{'class': 'LeveledCompactionStrategy'}}
    AND comment = 'headwater: one state a row; no other program may write it, and nothing USING TTL'"""

_DUE: Final = """\
CREATE TABLE IF NOT EXISTS {keyspace}.due (
    flow text,
    generation int,
    stage text,
    bucket int,
    due bigint,
    key blob,
    PRIMARY KEY ((flow, generation, stage, bucket), due, key)
) WITH compaction = {{'class': 'LeveledCompactionStrategy'}}
    AND comment = 'headwater: keys of states by the time at which they may be due; no other program may write it'"""

TABLES: Final = ("flow", "state", "due")
_ADDED: Final = {
    "flow": {"indexed": "boolean"},
    "state": {
        "mark": "bigint STATIC",
        "downstream": "text STATIC",
        "removed": "bigint STATIC",
        "due": "bigint",
    },
}
"""Columns that were added in later versions, by table."""

_APPLY_TIMEOUT: Final = 60.0
"""Seconds for one statement: nodes agree on a schema change in seconds; in a busy cluster, in tens of seconds."""


def schema(url: str) -> list[str]:
    """Return the CQL statements, in order, that create the schema of the store at `url`. Opens no connection.

    Raises:
        Terminal: The URL is invalid.
    """
    settings = CassandraSettings.parse(url)
    names = {"keyspace": settings.keyspace, "replication": settings.replication.cql()}
    return [statement.format(**names) for statement in (_KEYSPACE, _FLOW, _STATE, _DUE)]


def apply_schema(url: str, progress: Callable[[str], object] = lambda _line: None) -> list[str]:
    """Create the keyspace, tables and columns that are missing; existing ones are not changed.

    Only one operator may run it at a time, before any flow: Cassandra versions before 6 do not order schema
    changes of two clients.

    Args:
        url: The store's URL; its option `replication` sets the number of copies of a new keyspace.
        progress: Called with a line for each step.

    Returns:
        Names of the created parts, for example `table fleet.state`; empty if nothing was missing.

    Raises:
        Terminal: The cluster has fewer nodes than `replication` requires, refuses a statement, or has other
            tables under these names.
        Transient: The cluster cannot be reached.
    """
    settings = CassandraSettings.parse(url)
    progress(f"connecting to {settings.place}")
    cluster = None
    try:
        cluster, session = connect(settings)
        missing = _missing(settings.keyspace, cluster)
        if settings.keyspace not in cluster.metadata.keyspaces:
            _check_nodes(settings.replication, cluster)
        for statement in schema(url):
            progress(statement.partition("\n")[0].removesuffix(" ("))
            session.execute(statement, timeout=_APPLY_TIMEOUT)
        for table, column in _lacking(settings.keyspace, cluster):
            adding = f"ALTER TABLE {settings.keyspace}.{table} ADD {column}"
            progress(adding)
            session.execute(f"{adding} {_ADDED[table][column]}", timeout=_APPLY_TIMEOUT)
        if not cluster.control_connection.wait_for_schema_agreement(wait_time=_APPLY_TIMEOUT):
            raise Terminal(
                f"the nodes of {settings.place} do not agree on the schema",
                "Check `nodetool describecluster`, then run `headwater schema apply` again",
            )
        Statements(session, settings.keyspace)  # fails if the tables cannot be used
        return missing
    except DRIVER_ERRORS as error:
        raise translate(error, settings.place) from error
    finally:
        if cluster is not None:
            disconnect(cluster)


def _missing(keyspace: str, cluster: Any) -> list[str]:
    """The parts that `apply_schema` will create."""
    there = cluster.metadata.keyspaces.get(keyspace)
    tables = [f"table {keyspace}.{name}" for name in TABLES if there is None or name not in there.tables]
    tables += [f"column {keyspace}.{table}.{column}" for table, column in _lacking(keyspace, cluster)]
    return tables if there else [f"keyspace {keyspace}", *tables]


def _lacking(keyspace: str, cluster: Any) -> list[tuple[str, str]]:
    """Table and name of each column that is missing in a table that exists."""
    there = cluster.metadata.keyspaces.get(keyspace)
    tables = there.tables if there else {}
    return [
        (name, column)
        for name, columns in _ADDED.items()
        for column in columns
        if name in tables and column not in tables[name].columns
    ]


def _check_nodes(replication: Replication, cluster: Any) -> None:
    """Refuse more copies than nodes: Cassandra creates such a keyspace, but a quorum may be impossible."""
    nodes: dict[str, int] = {}
    for host in cluster.metadata.all_hosts():
        nodes[host.datacenter] = nodes.get(host.datacenter, 0) + 1
    wanted = dict(replication.datacentres) or dict.fromkeys(nodes, replication.everywhere)
    for dc, copies in wanted.items():
        if copies > nodes.get(dc, 0):
            raise Terminal(
                f"{copies} replicas are requested in data centre {dc}; number of its nodes: {nodes.get(dc, 0)}",
                f"Set the number in the URL, for example ?replication={max(nodes.get(dc, 1), 1)}",
            )

"""States in Apache Cassandra (4.0 or newer): one row per state, one partition per bucket."""

from persistence.cassandra.ddl import apply_schema, schema
from persistence.cassandra.preflight import RISKS, preflight
from persistence.cassandra.store import CassandraStore, open_store

__all__ = ["RISKS", "CassandraStore", "apply_schema", "open_store", "preflight", "schema"]

"""States in one LMDB environment: an embedded store, for one machine and several processes on it."""

from persistence.lmdb.store import LmdbStore, open_store

__all__ = ["LmdbStore", "open_store"]

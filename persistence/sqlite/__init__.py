"""States in one SQLite file: the embedded store, for one machine and several processes on it."""

from persistence.sqlite.store import SqliteStore, open_store

__all__ = ["SqliteStore", "open_store"]

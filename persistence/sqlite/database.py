"""A connection to one SQLite file: one per process, in WAL mode, with a bounded wait for its lock."""

import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from persistence.errors import InvalidUrl, Terminal
from persistence.names import FlowRef, StageRef
from persistence.sqlite.errors import translate

SCHEMA = 3
_APPLICATION_ID = 0x68647772  # "hdwr", in the file's header: identifies the file to `file` and to other programs

_DDL = """
CREATE TABLE flow (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    generation INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    manifest BLOB,
    UNIQUE (name, generation)
);
CREATE TABLE stage (
    id INTEGER PRIMARY KEY,
    flow INTEGER NOT NULL REFERENCES flow,
    name TEXT NOT NULL,
    mark INTEGER NOT NULL DEFAULT 0,
    downstream BLOB,
    removed INTEGER,
    UNIQUE (flow, name)
);
CREATE TABLE state (
    stage INTEGER NOT NULL REFERENCES stage,
    key BLOB NOT NULL,
    version INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    batch INTEGER NOT NULL,
    value BLOB NOT NULL,
    due INTEGER,
    UNIQUE (stage, key)
);
CREATE INDEX state_due ON state (stage, due) WHERE due IS NOT NULL;
CREATE VIEW readable AS
    SELECT flow.name AS flow, generation, stage.name AS stage, CAST(key AS TEXT) AS key,
           version, state.epoch AS epoch, batch, CAST(value AS TEXT) AS value
    FROM state JOIN stage ON stage.id = state.stage JOIN flow ON flow.id = stage.flow;
"""

_UPGRADES = {
    1: (
        "ALTER TABLE stage ADD COLUMN mark INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE stage ADD COLUMN downstream BLOB",
    ),
    2: (
        "ALTER TABLE stage ADD COLUMN removed INTEGER",
        "ALTER TABLE state ADD COLUMN due INTEGER",
        "CREATE INDEX state_due ON state (stage, due) WHERE due IS NOT NULL",
    ),
}
"""Statements that upgrade a schema to the next one."""

_databases: weakref.WeakSet["Database"] = weakref.WeakSet()
_inherited: list[sqlite3.Connection] = []


class Database:
    """A SQLite file and this process's connection to it, used by one thread at a time.

    Args:
        path: The file. The first write creates it and its directory when they are missing.
        synchronous: SQLite's `synchronous`: full, normal or off.
        busy_timeout: Seconds to wait for another process's lock.
    """

    def __init__(self, path: Path, *, synchronous: str, busy_timeout: float) -> None:
        self.path = path
        self._synchronous = synchronous
        self._busy_timeout = busy_timeout
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        _databases.add(self)

    @contextmanager
    def reading(self, ref: FlowRef | StageRef) -> Iterator[sqlite3.Connection]:
        """The connection, for statements that each see a consistent state by themselves.

        A missing file reads as empty and is not created.
        """
        with self._lock, self._translated(ref):
            if self._connection is None and self._identity() is None:
                with closing(_empty()) as connection:
                    yield connection
            else:
                yield self._open()

    @contextmanager
    def writing(self, ref: FlowRef | StageRef) -> Iterator[sqlite3.Connection]:
        """The connection within one write transaction, committed at the end and rolled back on any error."""
        with self._lock, self._translated(ref):
            connection = self._open()
            # IMMEDIATE waits for the lock here. A transaction that began with a read would
            # fail at its first write if another process had written in between.
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    with suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the connection; the next use opens it again."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    @contextmanager
    def _translated(self, ref: FlowRef | StageRef) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise translate(error, str(self.path), ref) from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect()
            self._file = self._identity()
        elif self._identity() != self._file:
            # The open file is unlinked: writes to it would be lost when the process ends.
            raise Terminal(
                f"{self.path} was deleted or replaced while it was open",
                "Start the flow again: the run compares the manifests",
            )
        return self._connection

    def _identity(self) -> tuple[int, int] | None:
        try:
            stat = os.stat(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:  # unlike a missing file, this one may contain states
            raise Terminal(
                f"{self.path} cannot be opened: {error.strerror}", "Check the path and its permissions"
            ) from error
        return stat.st_dev, stat.st_ino

    def _connect(self) -> sqlite3.Connection:
        if self.path.is_dir():
            raise InvalidUrl(f"{self.path} is a directory", "Name a file in it, for example sqlite:///PATH/states.db")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Terminal(
                f"{self.path.parent} cannot be created: {error.strerror}", "Choose another directory"
            ) from error
        connection = sqlite3.connect(
            self.path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False
        )
        try:
            # In one transaction: between two queries another process may create the tables.
            connection.execute("BEGIN")
            fresh = self._check_owner(connection)
            connection.execute("COMMIT")
            self._set_wal(connection)
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            # In pages, a few batches of states: each checkpoint writes and syncs the database file.
            connection.execute("PRAGMA wal_autocheckpoint = 4000")
            if fresh:
                self._create(connection)
            elif _schema(connection) < SCHEMA:
                self._upgrade(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_owner(self, connection: sqlite3.Connection) -> bool:
        """Whether the file is empty; refuse a file of another application or of a newer version."""
        (owner,) = connection.execute("PRAGMA application_id").fetchone()
        schema = _schema(connection)
        if owner == _APPLICATION_ID and schema <= SCHEMA:
            return False
        if owner == _APPLICATION_ID:
            raise Terminal(f"{self.path} has schema {schema}; this code reads {SCHEMA}", "Upgrade headwater")
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if owner or tables:
            raise Terminal(f"{self.path} is a database of another application", "Choose another file for the store")
        return True

    def _set_wal(self, connection: sqlite3.Connection) -> None:
        """Switch to WAL. SQLite does not wait for other writers here, so this method does."""
        end = time.monotonic() + self._busy_timeout
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise Terminal(f"{self.path} cannot use a write-ahead log", "Use a file on a local disk")

    def _create(self, connection: sqlite3.Connection) -> None:
        """Create the tables, all or none: an error closes the connection, which rolls back."""
        connection.execute("BEGIN IMMEDIATE")
        if self._check_owner(connection):  # otherwise another process has created them
            for statement in _DDL.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")

    def _upgrade(self, connection: sqlite3.Connection) -> None:
        """Upgrade a file of an older schema; a second process finds it upgraded."""
        connection.execute("BEGIN IMMEDIATE")
        for schema in range(_schema(connection), SCHEMA):
            for statement in _UPGRADES[schema]:
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")

    def forked(self) -> None:
        """Forget the parent's connection in a child process.

        SQLite forbids the child to use or close it, so it is kept until the child ends.
        """
        self._lock = threading.RLock()
        if self._connection is not None:
            _inherited.append(self._connection)
            self._connection = None


def _empty() -> sqlite3.Connection:
    """A database in memory with empty tables."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(_DDL)
    return connection


def _schema(connection: sqlite3.Connection) -> int:
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    return int(schema)


def _after_fork_in_child() -> None:
    for database in list(_databases):
        database.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)

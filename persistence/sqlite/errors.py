"""SQLite's result codes as store errors (https://www.sqlite.org/rescode.html)."""

import sqlite3

from persistence.errors import Corrupt, StoreError, Terminal, Transient
from persistence.names import FlowRef, StageRef

_PRIMARY = 0xFF  # the low byte of an extended code is its primary code

_TERMINAL = {
    sqlite3.SQLITE_PERM: "Give this user permission to read and write the file and its directory",
    sqlite3.SQLITE_READONLY: "Give this user permission to write the file and its directory",
    sqlite3.SQLITE_CANTOPEN: "Check that the directory exists and that this user may write there",
    sqlite3.SQLITE_AUTH: "Give this user permission to read and write the file and its directory",
    sqlite3.SQLITE_FULL: "Free space on the disk, then start the flow again",
    sqlite3.SQLITE_IOERR: "Check the disk; SQLite needs a local disk, not a network share",
    sqlite3.SQLITE_TOOBIG: "Keep less in a state: SQLite's limit is 1 GB per value",
}


def translate(error: sqlite3.Error, path: str, ref: FlowRef | StageRef | None) -> StoreError:
    """Return the store error for `error`."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & _PRIMARY
    what = f"{error} ({path})"
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Transient(what, "Another process has locked the file; raise busy_timeout if this persists", ref=ref)
    if code in (sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_PROTOCOL):
        return Transient(what, ref=ref)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Corrupt(what, ref=ref)
    return Terminal(what, _TERMINAL.get(code, "See the result codes of SQLite"), ref=ref)

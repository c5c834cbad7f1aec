"""LMDB's errors, and those of the system that it passes on, as store errors (http://www.lmdb.tech/doc/group__errors.html)."""

import errno

import lmdb

from persistence.errors import Corrupt, StoreError, Terminal, Transient
from persistence.names import FlowRef, StageRef

RIGHTS = "Give this user permission to read and write the directory and its files"

_DISK_FULL = "Free space on the disk, then start the flow again"
_TERMINAL = {
    errno.EACCES: RIGHTS,
    errno.EPERM: RIGHTS,
    errno.EROFS: RIGHTS,
    errno.ENOSPC: _DISK_FULL,
    errno.EDQUOT: _DISK_FULL,
    errno.EFBIG: "Raise the file size limit (`ulimit -f`), then start the flow again",
    errno.ENOMEM: "Raise the address space limit (`ulimit -v`): LMDB maps the whole environment",
    # LMDB also returns this code after a partial write.
    errno.EIO: "Free space on the disk, or check it; LMDB needs a local disk, not a network share",
    errno.ENOLCK: "Use a directory on a local disk, not on a network share",
    errno.EMFILE: "Raise the limit on open files (`ulimit -n`)",
}


def translate(error: lmdb.Error | OSError, path: str, ref: FlowRef | StageRef | None) -> StoreError:
    """Return the store error for `error`."""
    if isinstance(error, OSError):
        return Terminal(f"{error.strerror} ({path})", _TERMINAL.get(error.errno or 0, "See errno(3)"), ref=ref)
    what = f"{error} ({path})"
    match error:
        case lmdb.CorruptedError() | lmdb.PageNotFoundError() | lmdb.InvalidError():
            return Corrupt(what, ref=ref)
        case lmdb.ReadersFullError():
            return Transient(what, "Too many processes read this store: start fewer workers", ref=ref)
        case lmdb.PanicError() | lmdb.LockError() | lmdb.MapResizedError():
            return Transient(what, ref=ref)
        case lmdb.VersionMismatchError():
            return Terminal(what, "Choose another directory: another version of LMDB has written this one", ref=ref)
        case lmdb.TxnFullError():
            return Terminal(what, "Read fewer records in a batch", ref=ref)
    if "already open in this process" in what:
        remedy = "Give every URL of this directory the same `sync`, and open it by no other program of this process"
        return Terminal(what, remedy, ref=ref)
    return Terminal(what, _TERMINAL.get(getattr(error, "code", 0), "See the return codes of LMDB"), ref=ref)

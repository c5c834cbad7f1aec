"""An LMDB environment: opened once per process, whatever the number of handles, and never used across a fork."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import lmdb

from persistence.errors import InvalidUrl, Terminal
from persistence.lmdb.errors import RIGHTS, translate
from persistence.lmdb.layout import OWNER, SCHEMA, SHARDS, Owner, encode, read_owner
from persistence.lmdb.turns import turn
from persistence.names import FlowRef, StageRef

if TYPE_CHECKING:
    Transaction = lmdb.Transaction[bytes]
else:
    Transaction = lmdb.Transaction

T = TypeVar("T")
_Identity = tuple[tuple[int, int], ...]

MAP_BYTES: Final = 1 << 30
"""Address space that is mapped first. It is doubled whenever it is full; it takes neither memory nor disk."""
READERS: Final = 1022
"""Processes that can read at the same moment; the lock file has 64 bytes for each."""
_FILES: Final = ("data.mdb", "lock.mdb")

SYNC: Final[dict[str, dict[str, Any]]] = {"full": {}, "nometasync": {"metasync": False}, "nosync": {"sync": False}}
"""Options of LMDB by value of `sync`."""

_guard = threading.RLock()
_environments: "weakref.WeakValueDictionary[tuple[str, str], Environment]" = weakref.WeakValueDictionary()


def shared(path: Path, sync: str) -> "Environment":
    """This process's environment in a directory: LMDB forbids to open one twice."""
    name = os.path.realpath(path), sync
    with _guard:
        environment = _environments.get(name)
        if environment is None:
            environment = _environments[name] = Environment(Path(name[0]), sync)
        return environment


class Environment:
    """An LMDB environment, used by one thread at a time.

    Args:
        path: The directory. The first write creates it when it is missing.
        sync: One of `SYNC`.
    """

    def __init__(self, path: Path, sync: str) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._sync = sync
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._lmdb: lmdb.Environment | None = None
        self._files: _Identity = ()

    def read(self, user: object, ref: FlowRef | StageRef, action: Callable[[Transaction], T], absent: T) -> T:
        """Return the result of `action` in a read transaction; `absent` if there is no environment yet."""
        with self.lock, self._translated(ref):
            while environment := self._open(user, ref, create=False):
                try:
                    with environment.begin() as transaction:
                        return action(transaction)
                except lmdb.MapResizedError:
                    self._resize(environment, 0)
                except lmdb.ReadersFullError:
                    if not environment.reader_check():
                        raise
            return absent

    def write(self, user: object, ref: FlowRef | StageRef, action: Callable[[Transaction], T]) -> T:
        """Return the result of `action` in a write transaction, committed at its end and rolled back on any error.

        When the map is full it grows, and the transaction begins again: `action` may be called several times.
        """
        with self.lock, self._translated(ref):
            while True:
                environment = self._open(user, ref, create=True)
                assert environment is not None
                environment.reader_check()  # the pages that a killed reader had seen can be used again
                try:
                    with turn(self.path / _FILES[0], ref), environment.begin(write=True) as transaction:
                        if self._is_fresh(transaction, ref):
                            transaction.put(OWNER, encode(Owner()))
                        return action(transaction)
                except lmdb.MapFullError:
                    self._resize(environment, 2 * environment.info()["map_size"])
                except lmdb.MapResizedError:  # another process has enlarged it
                    self._resize(environment, 0)
                except lmdb.PanicError:
                    self._forget()
                    raise

    def release(self, user: object) -> None:
        """Close the environment once nothing of this process uses it; the next use opens it again."""
        with self.lock:
            self._users.discard(user)
            if not self._users:
                self._forget()

    def _forget(self) -> None:
        opened, self._lmdb = self._lmdb, None
        if opened is not None:
            opened.close()

    def _resize(self, environment: lmdb.Environment, size: int) -> None:
        """Set the size of the map; with 0 the size that other processes have given it."""
        try:
            environment.set_mapsize(size)
        except lmdb.Error:
            self._forget()  # it has no map now
            raise

    @contextmanager
    def _translated(self, ref: FlowRef | StageRef) -> Iterator[None]:
        try:
            yield
        except (lmdb.Error, OSError) as error:
            raise translate(error, str(self.path), ref) from error

    def _open(self, user: object, ref: FlowRef | StageRef, *, create: bool) -> lmdb.Environment | None:
        self._users.add(user)
        found = self._identity()
        if self._lmdb is not None:
            if found != self._files:
                # The open files are unlinked, or another process locks another file: its writes and ours would be lost.
                raise Terminal(
                    f"{self.path} was deleted or replaced while it was open",
                    "Start the flow again: the run compares the manifests",
                    ref=ref,
                )
            return self._lmdb
        if not found:
            self._check_directories()
            if not create:
                return None
            self._make_directory()
        opened = lmdb.open(str(self.path), map_size=MAP_BYTES, create=False, max_readers=READERS, **SYNC[self._sync])
        try:
            opened.reader_check()
            with opened.begin() as transaction:
                self._is_fresh(transaction, ref)
            self._files = self._identity()
            if not found:
                _sync_directories(self.path)
        except BaseException:
            opened.close()
            raise
        self._lmdb = opened
        return opened

    def _identity(self) -> _Identity:
        """Device and inode of each file; empty if there are no data."""
        try:
            files = [os.stat(self.path / name) for name in _FILES if (self.path / name).exists()]
            return tuple((file.st_dev, file.st_ino) for file in files) if (self.path / _FILES[0]).exists() else ()
        except OSError as error:
            raise Terminal(
                f"{self.path} cannot be opened: {error.strerror}", "Check the path and its permissions"
            ) from error

    def _check_directories(self) -> None:
        """Refuse directories with other files than those of a store."""
        shards = {*map(str, range(SHARDS))}
        for directory, ours in ((self.path.parent, shards), (self.path, {*_FILES})):
            if directory.exists() and not directory.is_dir():
                raise InvalidUrl(f"{directory} is not a directory", "Choose another directory")
            with suppress(OSError):  # it does not exist yet
                if others := sorted({file.name for file in directory.iterdir()} - ours):
                    raise Terminal(
                        f"{directory} contains other files, for example {others[0]}", "Choose another directory"
                    )

    def _make_directory(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except PermissionError as error:
            raise Terminal(f"{self.path} cannot be created: {error.strerror}", RIGHTS) from error
        except OSError as error:
            raise Terminal(f"{self.path} cannot be created: {error.strerror}", "Choose another directory") from error

    def _is_fresh(self, transaction: Transaction, ref: FlowRef | StageRef) -> bool:
        """Whether the environment is empty; refuse one of another application or of a newer version."""
        owner = read_owner(transaction.get(OWNER), ref)
        if owner is not None and owner.schema > SCHEMA:
            raise Terminal(
                f"{self.path} has schema {owner.schema}; this code reads {SCHEMA}", "Upgrade headwater", ref=ref
            )
        if owner is None and transaction.stat()["entries"]:
            raise Terminal(f"{self.path} is an environment of another application", "Choose another directory", ref=ref)
        return owner is None


def _sync_directories(path: Path) -> None:
    """Let the names of new files and directories survive a loss of power."""
    for directory in (path, path.parent, path.parent.parent):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_held: list[Environment] = []


def _before_fork() -> None:
    """Wait until no thread is within a transaction: a child that inherits one could not close the environment."""
    _guard.acquire()
    _held.extend(_environments.values())
    for environment in _held:
        environment.lock.acquire()


def _after_fork_in_parent() -> None:
    for environment in _held:
        environment.lock.release()
    _held.clear()
    _guard.release()


def _after_fork_in_child() -> None:
    """Close what the parent has opened: LMDB forbids the child to use it. The next use opens it again."""
    for environment in _held:
        environment._forget()
    _after_fork_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

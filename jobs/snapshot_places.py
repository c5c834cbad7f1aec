"""Where a snapshot is: in a file, or in a store, as STORE-URL#NAME."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO, Final, Protocol, TypeAlias

from jobs.environment import NotThereError, UsageError
from persistence.commit.faults import SNAPSHOT, effect
from persistence.names import StageRef
from persistence.registry import open_store
from persistence.snapshot_store import SnapshotStoreWriter, has_snapshot, read_snapshot, remove_snapshot, snapshot_ref
from persistence.urls import redact

Place: TypeAlias = Path | str
"""A file, or text of the form STORE-URL#NAME; without #NAME the snapshot is called `latest`."""
_NAME: Final = "latest"


class Written(Protocol):
    """A snapshot that is being written."""

    def write(self, data: bytes, /) -> int:
        """Write the next bytes."""
        ...

    def complete(self) -> int:
        """Let the snapshot appear in its place, and return its length in bytes."""
        ...


def place_of(text: str) -> Place:
    """The place that a text names."""
    return text if "://" in text else Path(text)


def shown(place: Place) -> str:
    """A place for a person, without secrets; `place_of` finds it again unless its URL contains some."""
    if isinstance(place, Path):
        return os.fspath(place)
    url, _, name = place.partition("#")
    return f"{redact(url)}#{name or _NAME}"


def url_of(place: str) -> str:
    """The URL of the store in a place."""
    return place.partition("#")[0]


@contextmanager
def written(place: Place, flow: str, *, replace: bool) -> Iterator[Written]:
    """A new snapshot, which appears in its place when it is complete.

    Args:
        place: The place.
        flow: Name of the flow.
        replace: Replace a snapshot that is there.

    Raises:
        UsageError: There is one, the file is not a regular one or cannot be written, or the name is invalid.
        StoreError: The store does not answer, or refuses a request.
    """
    if isinstance(place, Path):
        with _file(place, replace=replace) as file:
            yield file
        return
    with closing(open_store(url_of(place))) as store:
        ref = _ref(place, flow)
        exists = UsageError(f"{shown(place)} exists: give another name after #, or --replace")
        if not replace and has_snapshot(store, ref):
            raise exists
        writer = SnapshotStoreWriter(store, ref)
        if not replace and writer.replaces:  # another command has written it meanwhile
            raise exists
        yield _InStore(writer)


@contextmanager
def opened(place: Place, flow: str) -> Iterator[BinaryIO]:
    """The bytes of a snapshot.

    Args:
        place: The place.
        flow: Name of the flow.

    Raises:
        UsageError: The file cannot be opened, or is not a regular one.
        NotThereError: The store has no such snapshot.
        StoreError: The store does not answer, or refuses a request.
    """
    if isinstance(place, Path):
        with _opened(place) as file:
            yield file
        return
    with closing(open_store(url_of(place))) as store:
        found = read_snapshot(store, _ref(place, flow))
        if found is None:
            raise NotThereError(f"{shown(place)}: the store has no such snapshot of flow {flow}")
        yield found


def remove(place: Place, flow: str) -> None:
    """Remove a snapshot from a store, or the parts that a killed command has left.

    Args:
        place: The place.
        flow: Name of the flow.

    Raises:
        UsageError: The place is a file.
        NotThereError: The store has no such snapshot.
        StoreError: The store does not answer, or a newer command has begun. Repeat it.
    """
    if isinstance(place, Path):
        raise UsageError(f"{place} is a file: delete it")
    with closing(open_store(url_of(place))) as store:
        if not remove_snapshot(store, _ref(place, flow)):
            raise NotThereError(f"{shown(place)}: the store has no such snapshot of flow {flow}")


def _ref(place: str, flow: str) -> StageRef:
    try:
        return snapshot_ref(flow, place.partition("#")[2] or _NAME)
    except ValueError as error:
        raise UsageError(f"{shown(place)}: {error}") from error


class _InStore:
    def __init__(self, writer: SnapshotStoreWriter) -> None:
        self._writer = writer
        self.write = writer.write

    def complete(self) -> int:
        self._writer.complete()
        return self._writer.size


class _InFile:
    """A file beside the wanted one, which gets its name when it is complete."""

    def __init__(self, file: BinaryIO, part: Path, path: Path) -> None:
        self._file = file
        self._part = part
        self._path = path
        self.write = file.write

    def complete(self) -> int:
        self._file.flush()
        os.fsync(self._file.fileno())
        effect(SNAPSHOT, lambda: self._part.replace(self._path))
        return self._file.tell()


@contextmanager
def _file(path: Path, *, replace: bool) -> Iterator[_InFile]:
    """A new file beside the wanted one, readable by its owner alone; it is deleted unless it was renamed."""
    try:
        if path.exists():
            if not path.is_file():
                raise UsageError(f"{path} is not a regular file")
            if not replace:
                raise UsageError(f"{path} exists: give another file, or --replace")
        # A name of its own: in containers that share a volume, two processes may have the same number. Cut, because a
        # character has up to four bytes, and a file's name at most 255.
        handle, name = mkstemp(prefix=f".{path.name[:50]}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield _InFile(file, part, path)
    finally:
        part.unlink(missing_ok=True)


def _opened(path: Path) -> BinaryIO:
    try:
        if not path.is_file() and path.exists():
            raise UsageError(f"{path} is not a regular file")
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error

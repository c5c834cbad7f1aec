"""The SQLite store: one transaction per call."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from persistence.cas import check_distinct, check_epoch, check_is_epoch, check_manifest, check_not_removed, resolve
from persistence.commit.faults import DROP, effect, write_of
from persistence.errors import Corrupt, Fenced
from persistence.manifest import Manifest, decode_manifest, encode_manifest
from persistence.marks import (
    NONE,
    Acknowledged,
    Bucket,
    Mark,
    Marks,
    bucket_of_parts,
    check_held,
    encode_downstream,
)
from persistence.protocol import Capabilities, FlowRef, Removed, StageRef, Stored, Write
from persistence.sqlite.database import Database
from persistence.urls import choice, options, path_of, seconds

_PARAMETERS = 512
"""Keys per SELECT. More are no faster; Python caches 128 prepared statements."""
_PAGE = 1000
"""States per page of a scan, about 300 KB."""

_BUCKET = "0"

_UPDATE = """
UPDATE state SET version = version + 1, epoch = ?1, batch = ?2, value = ?3
WHERE stage = ?4 AND key = ?5 AND version = ?6 AND epoch <= ?1
"""
_INSERT = """
INSERT INTO state (epoch, batch, value, stage, key, version, due) VALUES (?1, ?2, ?3, ?4, ?5, ?6 + 1, ?7)
ON CONFLICT DO NOTHING
"""
_SET_DUE = "UPDATE state SET due = ?1 WHERE stage = ?2 AND key = ?3 AND (due IS NULL OR due < ?1)"
_REMOVE = """
DELETE FROM state WHERE rowid IN (SELECT rowid FROM state WHERE stage = ? AND due <= ? ORDER BY due LIMIT ?)
"""
_NEXT_DUE = "SELECT min(due) FROM state WHERE stage = ? AND due > ? AND due <= ?"
_EARLIEST = -(1 << 63)
_DUE_PAGE = "SELECT rowid, key FROM state WHERE stage = ? AND due = ? AND rowid > ? ORDER BY rowid LIMIT ?"
_REMOVED = 20_000
"""States that one transaction removes: other writers wait for it."""
_DROP_STATES = """
DELETE FROM state WHERE rowid IN (SELECT state.rowid FROM state JOIN stage ON stage.id = state.stage
    WHERE flow IN (SELECT id FROM flow WHERE name = ? AND generation = ?) LIMIT ?)
"""
_DROP_STAGES = "DELETE FROM stage WHERE flow IN (SELECT id FROM flow WHERE name = ? AND generation = ?)"
_FIRST_PAGE = """
SELECT key, version, epoch, batch, value FROM state WHERE stage = ? AND key >= ? ORDER BY key LIMIT ?
"""
_NEXT_PAGE = _FIRST_PAGE.replace(">=", ">")


class SqliteStore:
    """Keeps states in one SQLite file, safe for several processes of one machine.

    With `synchronous=full` (the default), acknowledged writes survive a loss of power, at one fsync per
    call. With `normal`, a loss of power may lose the last calls, but never an earlier call without the
    later ones. With `off`, it may damage the file. With any of them, a killed process loses nothing.
    The file must be on a local disk: WAL does not work on network shares.

    On two cores and a virtual disk: 200,000 to 260,000 conditional writes a second with `full`, 260,000 to
    280,000 with `normal` (300 bytes, 2,500 states a call, benchmarks/stores.py). Writers take turns; a writer
    that is frozen in the middle of a call blocks the others, up to `busy_timeout`.

    Args:
        path: The file. The first write creates it and its directory if they are missing; reading creates nothing.
        synchronous: SQLite's `synchronous`: full, normal or off.
        busy_timeout: Seconds to wait for another process's write to end, before `Transient`.
    """

    def __init__(self, path: Path, *, synchronous: str = "full", busy_timeout: float = 30.0) -> None:
        self._database = Database(path, synchronous=synchronous, busy_timeout=busy_timeout)
        self._capabilities = Capabilities(
            durable=synchronous == "full",
            ordered_durability=synchronous != "off",
            shared=True,
            atomic_save=True,
            ordered_scan=True,
            marked=True,
            counted=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def acquire_epoch(self, flow: FlowRef, *, above: int = 0) -> int:
        with self._database.writing(flow) as connection:
            (epoch,) = connection.execute(
                "INSERT INTO flow (name, generation, epoch) VALUES (?1, ?2, ?3 + 1) "
                "ON CONFLICT DO UPDATE SET epoch = max(epoch, ?3) + 1 RETURNING epoch",
                (flow.flow, flow.generation, above),
            ).fetchone()
        return int(epoch)

    def install_epoch(self, flow: FlowRef, epoch: int) -> None:
        check_is_epoch(flow, epoch)
        with self._database.writing(flow) as connection:
            (installed,) = connection.execute(
                "INSERT INTO flow (name, generation, epoch) VALUES (?1, ?2, ?3) "
                "ON CONFLICT DO UPDATE SET epoch = max(epoch, ?3) RETURNING epoch",
                (flow.flow, flow.generation, epoch),
            ).fetchone()
        if installed > epoch:
            raise Fenced.by(flow, epoch, installed)

    def installed_epoch(self, flow: FlowRef) -> int:
        with self._database.reading(flow) as connection:
            return _flow(connection, flow)[0]

    def load(self, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        with self._database.reading(stage) as connection:
            return _read(connection, stage, keys)

    def save(
        self,
        stage: StageRef,
        writes: Sequence[Write],
        *,
        epoch: int,
        batch: int,
        known: Marks = NONE,
        downstream: Acknowledged = NONE,
    ) -> Marks:
        check_distinct(stage, writes)
        if not writes:
            return {}
        note = encode_downstream(epoch, downstream)
        mark = effect(write_of(stage.stage), lambda: self._save(stage, writes, epoch, batch, known, note))
        return {_BUCKET: mark}

    def _save(
        self, stage: StageRef, writes: Sequence[Write], epoch: int, batch: int, known: Marks, note: bytes
    ) -> Mark:
        """Write everything in one transaction."""
        with self._database.writing(stage) as connection:
            check_epoch(stage, epoch, _flow(connection, stage.flow_ref)[0])
            number = _stage_number(connection, stage)
            bucket = _bucket(connection, stage)
            mark = bucket.mark
            check_held(stage, _BUCKET, mark, known)
            check_not_removed(stage, writes, bucket.removed)
            connection.execute("SAVEPOINT before")
            todo = writes
            if _replace(connection, number, writes, epoch, batch) < len(writes):
                # Rare: some writes are retries, or their states have changed. The stored states decide which.
                connection.execute("ROLLBACK TO before")
                stored = _read(connection, stage, [write.key for write in writes])
                todo = resolve(stage, writes, stored, epoch=epoch, batch=batch)
                _replace(connection, number, todo, epoch, batch)
            if not todo:
                return mark
            mark = mark.next()
            connection.execute(
                "UPDATE stage SET mark = ?, downstream = ? WHERE id = ?", (mark.count, note or None, number)
            )
            return mark

    def remove(self, stage: StageRef, until: int, *, epoch: int, batch: int, known: Marks = NONE) -> Removed:
        states = 0
        while True:
            mark, gone = effect(write_of(stage.stage), lambda: self._remove(stage, until, epoch, known))
            states += gone
            if gone < _REMOVED:
                return Removed(states, {_BUCKET: mark})

    def _remove(self, stage: StageRef, until: int, epoch: int, known: Marks) -> tuple[Mark, int]:
        """Remove some states in one transaction; return the mark and their number."""
        with self._database.writing(stage) as connection:
            check_epoch(stage, epoch, _flow(connection, stage.flow_ref)[0])
            number = _stage_number(connection, stage)
            mark = _bucket(connection, stage).mark
            check_held(stage, _BUCKET, mark, known)
            gone = connection.execute(_REMOVE, (number, until, _REMOVED)).rowcount
            mark = mark.next() if gone else mark
            connection.execute(
                "UPDATE stage SET mark = ?, removed = max(?, coalesce(removed, ?)) WHERE id = ?",
                (mark.count, until, until, number),
            )
            return mark, gone

    def due(self, stage: StageRef, until: int, *, after: int | None = None) -> Iterator[bytes]:
        # One time after the other, and by pages (see `scan`): with the time, the index gives the states by their row.
        due = self._next_due(stage, _EARLIEST if after is None else after, until)
        while due is not None:
            page = self._due_page(stage, due, 0)
            while page:
                yield from (key for _, key in page)
                page = self._due_page(stage, due, page[-1][0])
            due = self._next_due(stage, due, until)

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        with self._database.reading(stage) as connection:
            return {_BUCKET: _bucket(connection, stage)}

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        with self._database.reading(flow) as connection:
            value = _flow(connection, flow)[1]
        return None if value is None else decode_manifest(value, flow)

    def save_manifest(self, flow: FlowRef, manifest: Manifest, *, after: tuple[int, int] = (0, 0)) -> None:
        with self._database.writing(flow) as connection:
            installed, value = _flow(connection, flow)
            newest = None if value is None else decode_manifest(value, flow)
            check_manifest(flow, manifest, newest, installed, after)
            connection.execute(
                "UPDATE flow SET manifest = ? WHERE name = ? AND generation = ?",
                (encode_manifest(manifest), flow.flow, flow.generation),
            )

    def drop(self, flow: FlowRef) -> None:
        while self.installed_epoch(flow) and effect(DROP, lambda: self._drop(flow)):
            pass

    def _drop(self, flow: FlowRef) -> bool:
        """Remove some states of a generation in one transaction, and when none is left the rest of it."""
        name = flow.flow, flow.generation
        with self._database.writing(flow) as connection:
            if connection.execute(_DROP_STATES, (*name, _REMOVED)).rowcount == _REMOVED:
                return True
            connection.execute(_DROP_STAGES, name)
            connection.execute("DELETE FROM flow WHERE name = ? AND generation = ?", name)
            return False

    def scan(
        self, stage: StageRef, *, bucket: str | None = None, begin: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, Stored]]:
        # By pages: while one statement stays open, a slow reader makes the write-ahead log grow.
        page = self._page(_FIRST_PAGE, stage, begin)
        while page:
            for key, stored in page:
                if end is not None and key >= end:
                    return
                yield key, stored
            page = self._page(_NEXT_PAGE, stage, page[-1][0])

    def close(self) -> None:
        self._database.close()

    def _next_due(self, stage: StageRef, after: int, until: int) -> int | None:
        """The earliest time after `after`, and at or before `until`, at which a state is due."""
        with self._database.reading(stage) as connection:
            (found,) = connection.execute(_NEXT_DUE, (_find_stage(connection, stage), after, until)).fetchone()
        return None if found is None else int(found)

    def _due_page(self, stage: StageRef, due: int, last: int) -> list[tuple[int, bytes]]:
        with self._database.reading(stage) as connection:
            return connection.execute(_DUE_PAGE, (_find_stage(connection, stage), due, last, _PAGE)).fetchall()

    def _page(self, query: str, stage: StageRef, key: bytes) -> list[tuple[bytes, Stored]]:
        with self._database.reading(stage) as connection:
            rows = connection.execute(query, (_find_stage(connection, stage), key, _PAGE))
            return [(row[0], _stored(stage, row)) for row in rows]


def open_store(url: str) -> SqliteStore:
    """Open `sqlite:///absolute/path.db` or `sqlite://relative.db`.

    Options: `synchronous` (full, normal, off) and `busy_timeout` (seconds).

    Raises:
        Terminal: The URL has no path, or an unknown option.
    """
    path = path_of(url, "file", "Write sqlite:///absolute/path.db or sqlite://relative.db")
    known = {"synchronous": choice("full", "normal", "off"), "busy_timeout": seconds}
    return SqliteStore(path, **options(url, known))


def _flow(connection: sqlite3.Connection, flow: FlowRef) -> tuple[int, bytes | None]:
    """(installed epoch, manifest)."""
    row = connection.execute(
        "SELECT epoch, manifest FROM flow WHERE name = ? AND generation = ?", (flow.flow, flow.generation)
    ).fetchone()
    return row or (0, None)


def _find_stage(connection: sqlite3.Connection, stage: StageRef) -> int | None:
    row = connection.execute(
        "SELECT stage.id FROM stage JOIN flow ON flow.id = stage.flow "
        "WHERE flow.name = ? AND generation = ? AND stage.name = ?",
        (stage.flow, stage.generation, stage.stage),
    ).fetchone()
    return row[0] if row else None


def _bucket(connection: sqlite3.Connection, stage: StageRef) -> Bucket:
    """The mark and notes of a stage. A file goes back as a whole, so it is one bucket with one life."""
    query = "SELECT mark, downstream, removed FROM stage WHERE id = ?"
    mark, note, removed = connection.execute(query, (_find_stage(connection, stage),)).fetchone() or (0, None, None)
    return bucket_of_parts(Mark(mark), note, removed)


def _stage_number(connection: sqlite3.Connection, stage: StageRef) -> int:
    """The number of a stage, assigned if it has none. Its flow has an epoch, so the flow exists."""
    number = _find_stage(connection, stage)
    if number is None:
        (number,) = connection.execute(
            "INSERT INTO stage (flow, name) SELECT id, ? FROM flow WHERE name = ? AND generation = ? RETURNING id",
            (stage.stage, stage.flow, stage.generation),
        ).fetchone()
    return int(number)


def _replace(connection: sqlite3.Connection, number: int, writes: Sequence[Write], epoch: int, batch: int) -> int:
    """Apply the writes whose condition holds and return their number.

    In the order of their keys: neighbours are on one page of the index, which is then searched and changed once.
    """
    rows = [(epoch, batch, write.value, number, write.key, write.expected, write.due) for write in writes]
    rows.sort(key=itemgetter(4))
    added = connection.executemany(_INSERT, [row for row in rows if not row[5]]).rowcount
    changed = connection.executemany(_UPDATE, [row[:6] for row in rows if row[5]]).rowcount
    if dues := [(row[6], number, row[4]) for row in rows if row[5] and row[6] is not None]:
        connection.executemany(_SET_DUE, dues)
    return max(added, 0) + max(changed, 0)  # -1 if there was nothing to do


def _read(connection: sqlite3.Connection, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
    number = _find_stage(connection, stage)
    keys = sorted(keys)  # see _replace
    states: dict[bytes, Stored] = {}
    for start in range(0, len(keys), _PARAMETERS):
        part = keys[start : start + _PARAMETERS]
        # Padded to a power of two: only ten different statements, which stay in the cache.
        size = 1 << (len(part) - 1).bit_length()
        marks = ",".join("?" * size)
        rows = connection.execute(
            f"SELECT key, version, epoch, batch, value FROM state WHERE stage = ? AND key IN ({marks})",  # noqa: S608
            (number, *part, *([part[-1]] * (size - len(part)))),
        )
        states.update((row[0], _stored(stage, row)) for row in rows)
    return states


def _stored(stage: StageRef, row: tuple[bytes, int, int, int, bytes]) -> Stored:
    key, version, epoch, batch, value = row
    if type(value) is not bytes:
        raise Corrupt(f"the state is a {type(value).__name__}, not bytes", ref=stage, key=key)
    return Stored(version, epoch, batch, value)

"""Reading and writing the states of one bucket.

In the conditional mode, a batch of writes is one transaction (one Paxos round) on one partition. It compares the
expected version of every row and the bucket's fence, and takes effect as a whole or not at all. Writers of different
rows of a bucket do not conflict. (A single version per bucket would also work, but was no faster: writers of different
rows would conflict, and would have to read the rows again or lock the bucket.)

In the timestamp mode, a batch is written without a condition, after versions and fence have been read and found
correct. The timestamp of each cell has the epoch in the upper half and the version in the lower half, so the write of
the newest epoch and highest version wins, whenever it arrives. **The mode has these gaps:**

- A run that is delayed between its check and its write, while a newer run takes over, still replaces states that the
  newer run has not yet written. If such a state is upstream and holds elements whose downstream state the newer run
  had already replaced, the newer run treats those elements as duplicates, and they stay missing downstream.
- Two writers of one epoch that write a state at the same time may mix their values.
- A row that is deleted manually stays deleted, since the server's clock is far ahead of these timestamps.
- The mark of a bucket is checked before the write, and the bucket may go back between the two.
- A state that is created again after its removal, by a run of the same epoch, stays removed. Windows never are.

So the mode is only for flows that can never have two runs at a time, and is never chosen automatically.

A bucket's mark is the epoch and batch of the newest save, in a static column that each batch of writes compares and
raises. It detects that a bucket lost a whole batch. It does not detect that a bucket lost a part of a batch, since the
writes of a batch, from several tasks, leave the same mark. Nor does it detect that a single row went back, for
example if all replicas with a write lost it and the mark has been written again since.

States that are due are found by an index, a table of keys by bucket and due time. A transaction is for one table, so the
key is added to the index before the state is written. The index may therefore contain keys of states that are due
later, or do not exist; it lacks none. The state itself says when it is due. What the index notes up to a time is removed
after the bucket refuses states that are due then (contract 30), and after no such state was found.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from persistence.cas import check_not_removed, later, resolve
from persistence.cassandra.buckets import bounded
from persistence.cassandra.client import Client, Row
from persistence.cassandra.fences import Fences
from persistence.cassandra.settings import CONDITIONAL
from persistence.cassandra.statements import mark_of
from persistence.commit.faults import DROP, effect, write_of
from persistence.errors import Conflict, Corrupt, Transient
from persistence.marks import Bucket, Mark, Marks, bucket_of_parts, check_held
from persistence.names import StageRef
from persistence.protocol import Stored, Write

_REMOVED: Final = 100
"""States that one transaction removes."""
_KEYS: Final = 100
"""Keys per read, about one page."""
_ROUNDS: Final = 20
"""Consecutive attempts whose transaction is refused although the check before it passed. A second refusal needs a
second race."""

_EPOCH_BITS: Final = 32
"""A timestamp is epoch << 32 | version."""


class States:
    """The states of one bucket at a time."""

    def __init__(self, client: Client, fences: Fences) -> None:
        self._client = client
        self._fences = fences
        self._limit = client.settings.batch_bytes
        self._removed: dict[tuple[StageRef, int], int | None] = {}
        """By stage and bucket: the time up to which states were removed, when it was last read."""
        self._conditional = client.settings.mode == CONDITIONAL

    def load(self, stage: StageRef, bucket: int, keys: Sequence[bytes], *, serial: bool = False) -> dict[bytes, Stored]:
        """The states that exist among `keys`, which all belong to this bucket."""
        found: dict[bytes, Stored] = {}
        for start in range(0, len(keys), _KEYS):
            statement = self._client.live(stage).statements.states(stage, bucket, list(keys[start : start + _KEYS]))
            for page in self._client.pages(stage, statement, value_bytes, serial=serial):
                found.update((row[0], stored(stage, row)) for row in page)
        return found

    def scan(self, stage: StageRef, bucket: int, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, Stored]]:
        """The states of this bucket from the key `begin` up to but not including `end`, in the order of their keys."""
        statement = self._client.live(stage).statements.bucket(stage, bucket, begin)
        for page in self._client.pages(stage, statement, value_bytes):
            for row in page:
                if row[0] is None:  # a bucket with a fence and no state returns a row without a key
                    continue
                if end is not None and row[0] >= end:
                    return
                yield row[0], stored(stage, row)

    def bucket(self, stage: StageRef, bucket: int, *, serial: bool = True) -> Bucket:
        """The mark and notes of a bucket."""
        statement = self._client.live(stage).statements.mark(stage, bucket)
        rows = self._client.retried(lambda: self._client.rows(stage, statement, serial=serial))
        mark, note, removed = rows[0] if rows else (None, None, None)
        self._removed[stage, bucket] = removed
        return bucket_of_parts(Mark(mark or 0), note, removed)

    def save(
        self,
        stage: StageRef,
        bucket: int,
        writes: Sequence[Write],
        *,
        epoch: int,
        batch: int,
        known: Marks,
        note: str,
    ) -> list[bytes]:
        """Replace states of one bucket, in batches of bounded size, one after the other.

        Returns:
            The keys whose states have changed since they were loaded; their batches were not written.

        Raises:
            Fenced: A higher epoch is installed, or has written one of the states.
            StoreWentBack: The bucket does not hold its known mark.
            Terminal: The store does not know this epoch.
            Transient: The outcome of a batch is unknown.
        """
        changed: list[bytes] = []
        for part in bounded(writes, max(self._limit - len(note), 1)):
            try:
                _CqlBatch(self, stage, bucket, part, epoch, batch, known, note).write()
            except Conflict as conflict:
                changed.extend(conflict.keys)
        return changed

    def index(self, stage: StageRef, bucket: int, *, epoch: int) -> None:
        """Add to the index what an earlier version wrote to one bucket. It reads the keys of the whole bucket.

        Raises:
            Fenced: A higher epoch is installed.
            Terminal: The store does not know this epoch.
        """
        self._fences.check(stage, bucket, epoch, serial=self._conditional)
        dues: list[tuple[bytes, int]] = []
        for key, _, due in self._every_due(stage, bucket):
            dues.append((key, due))
            if len(dues) == _KEYS:
                self._add_to_index(stage, bucket, dues)
                dues.clear()
        self._add_to_index(stage, bucket, dues)

    def drop(self, stage: StageRef, bucket: int) -> None:
        """Remove a bucket, and its index.

        By the server's clock: the fence was raised after everything else was written, so everything is older. The client's
        clock may be behind.
        """
        statements = self._client.live(stage).statements
        rows = self._client.retried(lambda: self._client.rows(stage, statements.fenced_at(stage, bucket), serial=True))
        if rows and rows[0][0] is not None:
            statement = statements.drop_bucket(stage, bucket, rows[0][0])
            self._client.retried(lambda: effect(DROP, lambda: self._client.rows(stage, statement)))
        self._client.retried(lambda: self._client.rows(stage, statements.drop_index(stage, bucket)))

    def remove(
        self, stage: StageRef, bucket: int, until: int, *, epoch: int, batch: int, known: Marks
    ) -> tuple[Mark, int]:
        """Remove the states of one bucket that are due, by its index, and return its mark and their number.

        Raises:
            Fenced: A higher epoch is installed.
            StoreWentBack: The bucket does not hold its known mark.
            Terminal: The store does not know this epoch.
            Transient: The outcome of a transaction is unknown.
        """
        gone, removes = 0, False
        for _ in range(_ROUNDS):
            if not self._fences.check(stage, bucket, epoch, serial=self._conditional):
                continue
            held = self.bucket(stage, bucket, serial=self._conditional)
            check_held(stage, str(bucket), held.mark, known)
            due = [(key, version) for key, version, _ in self._due(stage, bucket, until, None)]
            if not due and held.removed is not None and held.removed >= until:
                if removes:
                    clearing = self._client.live(stage).statements.clear_index(stage, bucket, until)
                    self._client.retried(partial(self._client.rows, stage, clearing))
                return held.mark, gone
            removes = True
            mark, removed = max(mark_of(epoch, batch), held.mark.count), later(held.removed, until)
            for start in range(0, len(due), _REMOVED) or (0,):
                part = due[start : start + _REMOVED]
                after = Bucket(Mark(mark), removed=removed)
                change = partial(self._drop, stage, bucket, part, epoch, held, after)
                if not self._client.retried(lambda: effect(write_of(stage.stage), change)):  # noqa: B023
                    break  # refused, or applied although the answer was lost
                gone, held = gone + len(part), after
        raise _busy(stage)

    def due(self, stage: StageRef, bucket: int, until: int, after: int | None, *, indexed: bool) -> Iterator[bytes]:
        """The keys of the states of this bucket that are due after a time and at or before another.

        If an earlier version wrote states without the index, it reads the keys of the whole bucket.
        """
        if indexed:
            return (key for key, _, _ in self._due(stage, bucket, until, after))
        found = self._every_due(stage, bucket)
        return (key for key, _, due in found if due <= until and (after is None or due > after))

    def _due(self, stage: StageRef, bucket: int, until: int, after: int | None) -> Iterator[tuple[bytes, int, int]]:
        """Key, version and due time of the states that are due, by the index."""
        statements = self._client.live(stage).statements
        for page in self._client.pages(stage, statements.index(stage, bucket, until, after), _key_bytes):
            for start in range(0, len(page), _KEYS):
                part = page[start : start + _KEYS]
                reading = statements.dues_of(stage, bucket, list(dict.fromkeys(key for key, _ in part)))
                found = self._client.pages(stage, reading, _key_bytes, serial=self._conditional)
                held = {key: (version, due) for states in found for key, version, due in states}
                for key, due in part:
                    version, now = held.get(key, (None, None))
                    if now == due:
                        yield key, version, due

    def _every_due(self, stage: StageRef, bucket: int) -> Iterator[tuple[bytes, int, int]]:
        """Key, version and due time of all states of a bucket that have one."""
        statement = self._client.live(stage).statements.dues(stage, bucket)
        pages = self._client.pages(stage, statement, _key_bytes, serial=self._conditional)
        return (row for page in pages for row in page if row[2] is not None)

    def _add_to_index(self, stage: StageRef, bucket: int, dues: Sequence[tuple[bytes, int]]) -> None:
        """Add keys with their due times to the index of a bucket."""
        if dues:
            statement = self._client.live(stage).statements.add_to_index(stage, bucket, dues)
            self._client.retried(lambda: self._client.rows(stage, statement))

    def _drop(
        self,
        stage: StageRef,
        bucket: int,
        states: Sequence[tuple[bytes, int]],
        epoch: int,
        before: Bucket,
        after: Bucket,
    ) -> bool:
        """Remove states in one batch; return whether it took effect."""
        statements = self._client.live(stage).statements
        if self._conditional:
            return self._client.applied(stage, statements.remove(stage, bucket, states, epoch, before, after))[0]
        self._client.rows(stage, statements.drop(stage, bucket, states, epoch, after))
        return True


class _CqlBatch:
    """A batch in progress: sent, read back after a refusal or a lost answer, and sent again until it is written."""

    def __init__(
        self,
        states: States,
        stage: StageRef,
        bucket: int,
        writes: Sequence[Write],
        epoch: int,
        batch: int,
        known: Marks,
        note: str,
    ) -> None:
        self._states = states
        self._client = states._client
        self._stage, self._bucket, self._writes = stage, bucket, list(writes)
        self._epoch, self._batch = epoch, batch
        self._known, self._note = known, note
        # A transaction includes the check, except for due times that are known to be too early: it compares the time up
        # to which states were removed with the one that was last read. Before a plain write, the check is separate.
        removed = states._removed.get((stage, bucket))
        early = removed is not None and any(one.due is not None and one.due <= removed for one in writes)
        self._checked = states._conditional and not early

    def write(self) -> None:
        """Write it; after a refusal or an unknown outcome, read back before sending anything again."""
        dues = [(write.key, write.due) for write in self._writes if write.due is not None]
        self._states._add_to_index(self._stage, self._bucket, dues)
        self._client.retried(self._attempt)

    def _attempt(self) -> None:
        for _ in range(_ROUNDS):
            if not self._checked:
                self._check()
            if not self._writes:
                return
            self._checked = False
            if self._send():
                return
        raise _busy(self._stage)

    def _send(self) -> bool:
        """Send the remaining writes once; return whether they took effect."""
        return effect(write_of(self._stage.stage), self._execute)

    def _execute(self) -> bool:
        client, stage, bucket = self._client, self._stage, self._bucket
        statements = client.live(stage).statements
        if self._states._conditional:
            known = self._known.get(str(bucket), Mark()).count
            statement = statements.replace(
                *(stage, bucket, self._writes),
                epoch=self._epoch,
                batch=self._batch,
                known=known,
                note=self._note,
                removed=self._states._removed.get((stage, bucket)),
            )
            return client.applied(stage, statement)[0]
        timed = [(write, (self._epoch << _EPOCH_BITS) + write.expected + 1) for write in self._writes]
        client.rows(stage, statements.put(stage, bucket, timed, epoch=self._epoch, batch=self._batch, note=self._note))
        return True

    def _check(self) -> None:
        """Keep in `_writes` only what must still be written, by the rules of `persistence.cas`.

        Serial reads complete a transaction that was accepted and not finished. Plain writes leave none.
        """
        stage, serial = self._stage, self._states._conditional
        held = self._states.load(stage, self._bucket, [write.key for write in self._writes], serial=serial)
        # After the states: if the fence is still this run's epoch, no newer run had written before the read.
        allowed = self._states._fences.check(stage, self._bucket, self._epoch, serial=serial)
        if str(self._bucket) in self._known or any(write.due is not None for write in self._writes):
            bucket = self._states.bucket(stage, self._bucket, serial=serial)
            check_held(stage, str(self._bucket), bucket.mark, self._known)
            if allowed:
                check_not_removed(stage, self._writes, bucket.removed)
        if allowed:
            self._writes = resolve(stage, self._writes, held, epoch=self._epoch, batch=self._batch)
        self._checked = allowed


def _busy(stage: StageRef) -> Transient:
    return Transient(f"other writers changed the states during {_ROUNDS} attempts in a row", ref=stage)


def _key_bytes(row: Row) -> int:
    return len(row[0] or b"")


def value_bytes(row: Row) -> int:
    """Bytes of a row's value, which dominates the size of a page."""
    return len(row[4] or b"")


def stored(stage: StageRef, row: Row) -> Stored:
    """The state in a row.

    Raises:
        Corrupt: A column is missing, for example after a write by another program.
    """
    key, version, epoch, batch, value = row
    if version is None or epoch is None or batch is None or value is None:
        raise Corrupt("the state's row has no version, epoch, batch number or value", ref=stage, key=key)
    return Stored(version, epoch, batch, value)

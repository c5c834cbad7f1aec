"""The CQL of the store, prepared once per session. Table names include the keyspace.

After a server restart, the driver cannot prepare statements again that rely on `USE`.
"""

# ruff: noqa: S608 - only constants and the keyspace, a plain name, are inserted into the texts

from collections.abc import Iterable
from typing import Any, Final

from cassandra.query import BatchStatement, BatchType

from persistence.marks import Bucket
from persistence.names import FlowRef, StageRef
from persistence.protocol import Write

_FLOW: Final = "WHERE flow = ? AND generation = ?"
_BUCKET: Final = "WHERE flow = ? AND generation = ? AND stage = ? AND bucket = ?"
_STATE: Final = "version = ?, epoch = ?, batch_number = ?, value = ?"
_EPOCH_BITS: Final = 32
_COLUMNS: Final = "key, version, epoch, batch_number, value"


class Statements:
    """Statements with their values bound, ready to be executed.

    Args:
        session: The driver's session; every statement is prepared immediately.
        keyspace: Keyspace of the tables.

    Raises:
        InvalidRequest: The keyspace or a table is missing.
    """

    def __init__(self, session: Any, keyspace: str) -> None:
        flow, state, due = f"{keyspace}.flow", f"{keyspace}.state", f"{keyspace}.due"
        prepare = session.prepare
        self._flow = prepare(f"SELECT epoch, manifest FROM {flow} {_FLOW} LIMIT 1")
        self._stages = prepare(f"SELECT stage, buckets, mode, fenced, indexed FROM {flow} {_FLOW}")
        self._set_epoch = prepare(f"UPDATE {flow} SET epoch = ? {_FLOW} IF epoch = ?")
        self._set_manifest = prepare(f"UPDATE {flow} SET manifest = ? {_FLOW} IF epoch = ? AND manifest = ?")
        self._add_stage = prepare(
            f"UPDATE {flow} SET buckets = ?, mode = ?, indexed = true {_FLOW} AND stage = ? "
            "IF buckets = NULL AND epoch = ?"
        )
        self._set_indexed = prepare(f"UPDATE {flow} SET indexed = true {_FLOW} AND stage = ? IF epoch = ?")
        self._drop_stage = prepare(f"DELETE FROM {flow} {_FLOW} AND stage = ? IF EXISTS")
        self._fenced_at = prepare(f"SELECT writetime(fence) FROM {state} {_BUCKET} LIMIT 1")
        self._drop_bucket = prepare(f"DELETE FROM {state} USING TIMESTAMP ? {_BUCKET}")
        self._set_fenced = prepare(f"UPDATE {flow} SET fenced = ? {_FLOW} AND stage = ? IF epoch = ?")
        self._fence = prepare(f"SELECT fence FROM {state} {_BUCKET} LIMIT 1")
        self._set_fence = prepare(f"UPDATE {state} SET fence = ? {_BUCKET} IF fence = ?")
        self._states = prepare(f"SELECT {_COLUMNS} FROM {state} {_BUCKET} AND key IN ?")
        self._bucket = prepare(f"SELECT {_COLUMNS} FROM {state} {_BUCKET}")
        self._bucket_from = prepare(f"SELECT {_COLUMNS} FROM {state} {_BUCKET} AND key >= ?")
        self._replace = prepare(f"UPDATE {state} SET {_STATE} {_BUCKET} AND key = ? IF version = ? AND fence = ?")
        self._mark = prepare(f"UPDATE {state} SET mark = ?, downstream = ? {_BUCKET} IF fence = ? AND mark >= ?")
        self._first_mark = prepare(f"UPDATE {state} SET mark = ?, downstream = ? {_BUCKET} IF fence = ?")
        self._put_mark = prepare(f"UPDATE {state} USING TIMESTAMP ? SET mark = ?, downstream = ? {_BUCKET}")
        self._marks = prepare(f"SELECT mark, downstream, removed FROM {state} {_BUCKET} LIMIT 1")
        self._put = prepare(f"UPDATE {state} USING TIMESTAMP ? SET {_STATE} {_BUCKET} AND key = ?")
        self._put_due = prepare(f"UPDATE {state} USING TIMESTAMP ? SET {_STATE}, due = ? {_BUCKET} AND key = ?")
        self._replace_due = prepare(
            f"UPDATE {state} SET {_STATE}, due = ? {_BUCKET} AND key = ? IF version = ? AND fence = ? AND removed = ?"
        )
        self._dues = prepare(f"SELECT key, version, due FROM {state} {_BUCKET}")
        self._dues_of = prepare(f"SELECT key, version, due FROM {state} {_BUCKET} AND key IN ?")
        self._index = prepare(f"SELECT key, due FROM {due} {_BUCKET} AND due <= ?")
        self._index_after = prepare(f"SELECT key, due FROM {due} {_BUCKET} AND due <= ? AND due > ?")
        self._add_to_index = prepare(
            f"INSERT INTO {due} (flow, generation, stage, bucket, due, key) VALUES (?, ?, ?, ?, ?, ?)"
        )
        self._clear_index = prepare(f"DELETE FROM {due} {_BUCKET} AND due <= ?")
        self._drop_index = prepare(f"DELETE FROM {due} {_BUCKET}")
        self._set_removed = prepare(
            f"UPDATE {state} SET mark = ?, removed = ? {_BUCKET} IF fence = ? AND mark = ? AND removed = ?"
        )
        self._put_removed = prepare(f"UPDATE {state} USING TIMESTAMP ? SET mark = ?, removed = ? {_BUCKET}")
        self._remove = prepare(f"DELETE FROM {state} {_BUCKET} AND key = ? IF version = ? AND fence = ?")
        self._drop = prepare(f"DELETE FROM {state} USING TIMESTAMP ? {_BUCKET} AND key = ?")

    def flow(self, flow: FlowRef) -> Any:
        """(epoch, manifest) of a flow; no row for an unknown flow."""
        return self._flow.bind((flow.flow, flow.generation))

    def stages(self, flow: FlowRef) -> Any:
        """(stage, buckets, mode, fenced, indexed) of each stage written to; one row of None if the flow has no stage."""
        return self._stages.bind((flow.flow, flow.generation))

    def set_epoch(self, flow: FlowRef, epoch: int | None, found: int) -> Any:
        """Install `epoch`, or none, if the installed one is still `found`."""
        return self._set_epoch.bind((epoch, flow.flow, flow.generation, found or None))

    def set_manifest(self, flow: FlowRef, manifest: str | None, epoch: int, found: str | None) -> Any:
        """Replace or remove the manifest if it is still `found` and `epoch` is still the installed one."""
        return self._set_manifest.bind((manifest, flow.flow, flow.generation, epoch, found))

    def add_stage(self, stage: StageRef, buckets: int, mode: str, epoch: int) -> Any:
        """Register a new stage if `epoch` is the installed one."""
        return self._add_stage.bind((buckets, mode, stage.flow, stage.generation, stage.stage, epoch))

    def drop_stage(self, stage: StageRef) -> Any:
        """Remove the layout of a stage."""
        return self._drop_stage.bind((stage.flow, stage.generation, stage.stage))

    def fenced_at(self, stage: StageRef, bucket: int) -> Any:
        """(timestamp of the fence,) of a bucket, in microseconds since 1970; no row for an unused bucket."""
        return self._fenced_at.bind(_bucket(stage, bucket))

    def drop_bucket(self, stage: StageRef, bucket: int, timestamp: int) -> Any:
        """Remove everything in a bucket that was written at or before a time, in microseconds since 1970."""
        return self._drop_bucket.bind((timestamp, *_bucket(stage, bucket)))

    def set_fenced(self, stage: StageRef, epoch: int, *, fenced: bool) -> Any:
        """Record whether every bucket of a stage has a fence, if `epoch` is the installed one."""
        return self._set_fenced.bind((fenced, stage.flow, stage.generation, stage.stage, epoch))

    def set_indexed(self, stage: StageRef, epoch: int) -> Any:
        """Record that every state of a stage with a due time is in the index, if `epoch` is the installed one."""
        return self._set_indexed.bind((stage.flow, stage.generation, stage.stage, epoch))

    def fence(self, stage: StageRef, bucket: int) -> Any:
        """(fence,) of a bucket; no row for an unused bucket."""
        return self._fence.bind(_bucket(stage, bucket))

    def set_fence(self, stage: StageRef, bucket: int, epoch: int, found: int) -> Any:
        """Raise the fence of a bucket to `epoch` if it is still `found`."""
        return self._set_fence.bind((epoch, *_bucket(stage, bucket), found or None))

    def states(self, stage: StageRef, bucket: int, keys: list[bytes]) -> Any:
        """The states of these keys in one bucket: (key, version, epoch, batch, value)."""
        return self._states.bind((*_bucket(stage, bucket), keys))

    def bucket(self, stage: StageRef, bucket: int, begin: bytes = b"") -> Any:
        """The states of a bucket from the key `begin`; one row of None if it has a fence and no state at all."""
        if begin:
            return self._bucket_from.bind((*_bucket(stage, bucket), begin))
        return self._bucket.bind(_bucket(stage, bucket))

    def mark(self, stage: StageRef, bucket: int) -> Any:
        """(mark, downstream, removed) of a bucket; no row for an unused bucket."""
        return self._marks.bind(_bucket(stage, bucket))

    def replace(
        self,
        stage: StageRef,
        bucket: int,
        writes: Iterable[Write],
        *,
        epoch: int,
        batch: int,
        known: int,
        note: str,
        removed: int | None,
    ) -> Any:
        """One transaction: all writes, if each finds its version, `epoch` as the fence, and `known` or more as the mark.

        Writes with a due time must also find `removed` as the time up to which states were removed.
        """
        place, mark = _bucket(stage, bucket), mark_of(epoch, batch)
        marking = (
            self._mark.bind((mark, note, *place, epoch, known))
            if known
            else self._first_mark.bind((mark, note, *place, epoch))
        )
        replacing = []
        for write in writes:
            state, found = (write.expected + 1, epoch, batch, write.value), (write.key, write.expected or None, epoch)
            if write.due is None:
                replacing.append(self._replace.bind((*state, *place, *found)))
            else:
                replacing.append(self._replace_due.bind((*state, write.due, *place, *found, removed)))
        return _together([marking, *replacing])

    def dues(self, stage: StageRef, bucket: int) -> Any:
        """(key, version, due) of the states of a bucket; one row of None if it has a fence and no state at all."""
        return self._dues.bind(_bucket(stage, bucket))

    def dues_of(self, stage: StageRef, bucket: int, keys: list[bytes]) -> Any:
        """(key, version, due) of the states of these keys in one bucket."""
        return self._dues_of.bind((*_bucket(stage, bucket), keys))

    def index(self, stage: StageRef, bucket: int, until: int, after: int | None) -> Any:
        """(key, due) of the index of a bucket, in the order of due times, after one and up to another."""
        if after is None:
            return self._index.bind((*_bucket(stage, bucket), until))
        return self._index_after.bind((*_bucket(stage, bucket), until, after))

    def add_to_index(self, stage: StageRef, bucket: int, dues: Iterable[tuple[bytes, int]]) -> Any:
        """Note that these keys may be due at these times."""
        place = _bucket(stage, bucket)
        return _together(self._add_to_index.bind((*place, due, key)) for key, due in dues)

    def drop_index(self, stage: StageRef, bucket: int) -> Any:
        """Remove the index of a bucket."""
        return self._drop_index.bind(_bucket(stage, bucket))

    def clear_index(self, stage: StageRef, bucket: int, until: int) -> Any:
        """Remove what the index of a bucket notes up to a time."""
        return self._clear_index.bind((*_bucket(stage, bucket), until))

    def remove(
        self,
        stage: StageRef,
        bucket: int,
        states: Iterable[tuple[bytes, int]],
        epoch: int,
        before: Bucket,
        after: Bucket,
    ) -> Any:
        """One transaction: states leave, if each has its version, and `epoch` is the fence.

        Args:
            stage: The stage.
            bucket: The bucket.
            states: Key and version of each.
            epoch: Epoch of the run.
            before: The bucket's mark, and the time up to which states were removed: these must be found.
            after: The new ones.
        """
        place = _bucket(stage, bucket)
        found = epoch, before.mark.count or None, before.removed
        marking = self._set_removed.bind((after.mark.count, after.removed, *place, *found))
        return _together([marking, *(self._remove.bind((*place, key, version, epoch)) for key, version in states)])

    def drop(self, stage: StageRef, bucket: int, states: Iterable[tuple[bytes, int]], epoch: int, after: Bucket) -> Any:
        """The same without conditions, with the timestamps of `put`."""
        place, mark = _bucket(stage, bucket), after.mark.count
        marking = self._put_removed.bind((mark, mark, after.removed, *place))
        dropping = (self._drop.bind(((epoch << _EPOCH_BITS) + version, *place, key)) for key, version in states)
        return _together([marking, *dropping])

    def put(
        self, stage: StageRef, bucket: int, writes: Iterable[tuple[Write, int]], *, epoch: int, batch: int, note: str
    ) -> Any:
        """All writes, unconditionally, each with its timestamp: an older write does not replace a newer state."""
        place, mark = _bucket(stage, bucket), mark_of(epoch, batch)
        putting = []
        for write, timestamp in writes:
            state = (timestamp, write.expected + 1, epoch, batch, write.value)
            if write.due is None:
                putting.append(self._put.bind((*state, *place, write.key)))
            else:
                putting.append(self._put_due.bind((*state, write.due, *place, write.key)))
        return _together([self._put_mark.bind((mark, mark, note, *place)), *putting])


def mark_of(epoch: int, batch: int) -> int:
    """The mark after a save of this batch."""
    return (epoch << _EPOCH_BITS) + batch


def _bucket(stage: StageRef, bucket: int) -> tuple[str, int, str, int]:
    return stage.flow, stage.generation, stage.stage, bucket


def _together(statements: Iterable[Any]) -> Any:
    """A batch; it is atomic because all its statements are for one partition."""
    batch = BatchStatement(BatchType.UNLOGGED)
    for statement in statements:
        batch.add(statement)
    return batch

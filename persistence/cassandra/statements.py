"""The CQL of the store, prepared once a session. Tables are named with their keyspace.

A prepared statement that relies on `USE` cannot be prepared again by the driver after a server's restart.
"""

# ruff: noqa: S608 - what stands in the texts is the keyspace, which is a plain name, and constants

from collections.abc import Iterable
from typing import Any, Final

from cassandra.query import BatchStatement, BatchType

from persistence.names import FlowRef, StageRef
from persistence.protocol import Write

_FLOW: Final = "WHERE flow = ? AND generation = ?"
_BUCKET: Final = "WHERE flow = ? AND generation = ? AND stage = ? AND bucket = ?"
_STATE: Final = "version = ?, term = ?, batch_number = ?, value = ?"
_TERM_BITS: Final = 32
_COLUMNS: Final = "key, version, term, batch_number, value"


class Statements:
    """Statements with their values bound, ready to be executed.

    Args:
        session: The driver's session; every statement is prepared now.
        keyspace: Where the tables are.

    Raises:
        InvalidRequest: The keyspace or a table is missing.
    """

    def __init__(self, session: Any, keyspace: str) -> None:
        flow, state = f"{keyspace}.flow", f"{keyspace}.state"
        prepare = session.prepare
        self._flow = prepare(f"SELECT term, manifest FROM {flow} {_FLOW} LIMIT 1")
        self._stages = prepare(f"SELECT stage, buckets, mode, fenced FROM {flow} {_FLOW}")
        self._set_term = prepare(f"UPDATE {flow} SET term = ? {_FLOW} IF term = ?")
        self._set_manifest = prepare(f"UPDATE {flow} SET manifest = ? {_FLOW} IF term = ? AND manifest = ?")
        self._add_stage = prepare(
            f"UPDATE {flow} SET buckets = ?, mode = ? {_FLOW} AND stage = ? IF buckets = NULL AND term = ?"
        )
        self._set_fenced = prepare(f"UPDATE {flow} SET fenced = true {_FLOW} AND stage = ? IF term = ?")
        self._fence = prepare(f"SELECT fence FROM {state} {_BUCKET} LIMIT 1")
        self._set_fence = prepare(f"UPDATE {state} SET fence = ? {_BUCKET} IF fence = ?")
        self._states = prepare(f"SELECT {_COLUMNS} FROM {state} {_BUCKET} AND key IN ?")
        self._bucket = prepare(f"SELECT {_COLUMNS} FROM {state} {_BUCKET}")
        self._replace = prepare(f"UPDATE {state} SET {_STATE} {_BUCKET} AND key = ? IF version = ? AND fence = ?")
        self._mark = prepare(f"UPDATE {state} SET mark = ?, downstream = ? {_BUCKET} IF fence = ? AND mark >= ?")
        self._first_mark = prepare(f"UPDATE {state} SET mark = ?, downstream = ? {_BUCKET} IF fence = ?")
        self._put_mark = prepare(f"UPDATE {state} USING TIMESTAMP ? SET mark = ?, downstream = ? {_BUCKET}")
        self._marks = prepare(f"SELECT mark, downstream FROM {state} {_BUCKET} LIMIT 1")
        self._put = prepare(f"UPDATE {state} USING TIMESTAMP ? SET {_STATE} {_BUCKET} AND key = ?")

    def flow(self, flow: FlowRef) -> Any:
        """(term, manifest) of a flow; no row when nothing is known of it."""
        return self._flow.bind((flow.flow, flow.generation))

    def stages(self, flow: FlowRef) -> Any:
        """(stage, buckets, mode, fenced) of each stage written to; one row of None when only the flow is known."""
        return self._stages.bind((flow.flow, flow.generation))

    def set_term(self, flow: FlowRef, term: int, found: int) -> Any:
        """Install `term` if the installed one is still `found`."""
        return self._set_term.bind((term, flow.flow, flow.generation, found or None))

    def set_manifest(self, flow: FlowRef, manifest: str, term: int, found: str | None) -> Any:
        """Replace the manifest if it is still `found` and `term` still the installed one."""
        return self._set_manifest.bind((manifest, flow.flow, flow.generation, term, found))

    def add_stage(self, stage: StageRef, buckets: int, mode: str, term: int) -> Any:
        """Make a stage known if it is not and `term` is the installed one."""
        return self._add_stage.bind((buckets, mode, stage.flow, stage.generation, stage.stage, term))

    def set_fenced(self, stage: StageRef, term: int) -> Any:
        """Note that every bucket of a stage has a fence, if `term` is the installed one."""
        return self._set_fenced.bind((stage.flow, stage.generation, stage.stage, term))

    def fence(self, stage: StageRef, bucket: int) -> Any:
        """(fence,) of a bucket; no row when it is untouched."""
        return self._fence.bind(_bucket(stage, bucket))

    def set_fence(self, stage: StageRef, bucket: int, term: int, found: int) -> Any:
        """Let only writers of `term` into the bucket, if until now it were those of `found`."""
        return self._set_fence.bind((term, *_bucket(stage, bucket), found or None))

    def states(self, stage: StageRef, bucket: int, keys: list[bytes]) -> Any:
        """The states of these keys of one bucket: (key, version, term, batch, value)."""
        return self._states.bind((*_bucket(stage, bucket), keys))

    def bucket(self, stage: StageRef, bucket: int) -> Any:
        """All states of a bucket; one row of None when it has a fence and no state."""
        return self._bucket.bind(_bucket(stage, bucket))

    def mark(self, stage: StageRef, bucket: int) -> Any:
        """(mark, downstream) of a bucket; no row when it is untouched."""
        return self._marks.bind(_bucket(stage, bucket))

    def replace(
        self, stage: StageRef, bucket: int, writes: Iterable[Write], *, term: int, batch: int, known: int, note: str
    ) -> Any:
        """One transaction: all writes, if each finds its version, `term` as the fence, and `known` or more as the mark."""
        place, mark = _bucket(stage, bucket), mark_of(term, batch)
        marking = (
            self._mark.bind((mark, note, *place, term, known))
            if known
            else self._first_mark.bind((mark, note, *place, term))
        )
        replacing = (
            self._replace.bind(
                (
                    *(write.expected + 1, term, batch, write.value),
                    *place,
                    *(write.key, write.expected or None, term),
                )
            )
            for write in writes
        )
        return _together([marking, *replacing])

    def put(
        self, stage: StageRef, bucket: int, writes: Iterable[tuple[Write, int]], *, term: int, batch: int, note: str
    ) -> Any:
        """All writes, unconditionally, each with its timestamp: an older one leaves a newer state as it is."""
        place, mark = _bucket(stage, bucket), mark_of(term, batch)
        putting = (
            self._put.bind((timestamp, write.expected + 1, term, batch, write.value, *place, write.key))
            for write, timestamp in writes
        )
        return _together([self._put_mark.bind((mark, mark, note, *place)), *putting])


def mark_of(term: int, batch: int) -> int:
    """The mark that a save of this batch leaves."""
    return (term << _TERM_BITS) + batch


def _bucket(stage: StageRef, bucket: int) -> tuple[str, int, str, int]:
    return stage.flow, stage.generation, stage.stage, bucket


def _together(statements: Iterable[Any]) -> Any:
    """A batch, which is atomic because all of it is of one partition."""
    batch = BatchStatement(BatchType.UNLOGGED)
    for statement in statements:
        batch.add(statement)
    return batch

"""Looking up rows of a table, message by message, and reading them from its states."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from aggregations.definition.expressions import is_mapping, key_bytes
from aggregations.definition.lookups import LatestRow, Lookup, Missing, Row
from aggregations.definition.schemas import schema_after
from aggregations.errors import FlowError, RunRefusedError
from aggregations.per_message.cause import Cause
from envelope import EnvelopeError, Reason
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.errors import Transient
from persistence.protocol import FlowRef, StateStore
from persistence.record import decode_record

if TYPE_CHECKING:
    from aggregations.per_message.steps import Applied

Tables: TypeAlias = Callable[[str, Sequence[bytes]], Mapping[bytes, Row]]
"""Returns the rows that a table has, by key; its arguments are the table's name and the keys."""

NO_ENTRY: Final = Cause(Reason.MISSING_ENTRY, "the table has no row for its key")


def no_tables(table: str, keys: Sequence[bytes]) -> Mapping[bytes, Row]:
    """For steps that look up nothing."""
    raise AssertionError(f"table {table} is looked up without a store")


def rows_before(
    store: StateStore, ref: FlowRef, table: str, keys: Sequence[bytes], *, epoch: int, batch: int
) -> dict[bytes, Row]:
    """The rows of a table as of the manifest before a batch.

    A batch that reads the sources leaves the tables as they are, so the stored rows are those of the manifest. A task of
    an earlier attempt may still run when a later batch has changed them: the manifest, read after the rows, shows it.

    Args:
        store: The table's store.
        ref: The flow's name and generation.
        table: Name of the table.
        keys: The keys.
        epoch: Epoch of the run.
        batch: Number of the batch that looks them up.

    Raises:
        Transient: The batch is not the current one any more.
    """
    found = effect(CommitStep.LOAD.of(table), lambda: current_rows(store, ref, table, keys))
    manifest = store.load_manifest(ref)
    if manifest is None or (manifest.epoch, manifest.batch) != (epoch, batch - 1):
        raise Transient(
            f"table {table} may have changed since batch {batch} began", "Another attempt reads it again", ref
        )
    return found


def current_rows(store: StateStore, ref: FlowRef, table: str, keys: Sequence[bytes]) -> dict[bytes, Row]:
    """The rows of a table as they are stored, by key; deleted ones are missing."""
    stage, read, longest = ref.stage(table), LatestRow(()).result, store.capabilities.max_key_bytes
    held = [key for key in keys if longest is None or len(key) <= longest]  # the store refuses a longer key
    found = {
        key: read(decode_record(one.value, stage, key).state or {}) for key, one in store.load(stage, held).items()
    }
    return {key: row for key, row in found.items() if row is not None}


def look_up(applied: "Applied", step: Lookup) -> None:
    """Add the columns of a table's rows to the elements."""
    keys = applied.survivors([lookup_key(value) for value in applied.each(step.key)])
    wanted = sorted({key for key in keys if key is not None})
    rows = applied.tables(step.table, wanted) if wanted else {}
    found = [None if key is None else rows.get(key) for key in keys]
    if step.missing is Missing.DEAD_LETTER:
        error = EnvelopeError(NO_ENTRY.reason, NO_ENTRY.detail)
        found = applied.survivors([error if row is None else row for row in found])
    if step.missing is Missing.DROP:
        before = len(found)
        pairs = [(element, row) for element, row in zip(applied.elements, found, strict=True) if row is not None]
        applied.elements, found = [element for element, _ in pairs], [row for _, row in pairs]
        applied.filtered += before - len(found)
    applied.elements = [
        element.of({**element.value, **new_columns(step, row)}) if is_mapping(element.value) else element
        for element, row in zip(applied.elements, found, strict=True)
    ]
    applied.schema = schema_after(step, applied.schema)


def new_columns(step: Lookup, row: Row | None) -> dict[str, Any]:
    """The columns that a lookup adds.

    Raises:
        RunRefusedError: The row was stored when the flow looked up other columns.
    """
    if row is not None and (lacking := sorted({*step.columns.values()} - row.keys())):
        raise RunRefusedError(
            f"table {step.table} has rows without {', '.join(lacking)}: an earlier definition of the flow did not look it up. "
            "Rebuild the flow (`headwater replay --redefine`)"
        )
    return {name: None if row is None else row[of] for name, of in step.columns.items()}


def lookup_key(value: Any) -> bytes | EnvelopeError | None:
    """The bytes of a key to look up, or the error if the value cannot be a key."""
    try:
        return key_bytes(value)
    except FlowError as error:
        return EnvelopeError(Reason.BAD_PAYLOAD, str(error))

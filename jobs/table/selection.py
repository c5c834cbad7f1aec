"""Which states are read: keys, a range of keys, a condition."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import polars as pl

from aggregations.definition.expressions import expression
from aggregations.definition.windows import WindowKey
from aggregations.errors import FlowError
from jobs.table.view import View


@dataclass(frozen=True, slots=True)
class Selection:
    """Which states are read.

    Attributes:
        keys: Only these keys of the stage; None for all.
        prefix: Only keys that begin with these bytes.
        after: Only higher keys than this one.
        where: Only states for which this is true.
        older_than_ms: Only states that were written before this time, in milliseconds since 1970.
        newer_than_ms: Only states that may have been written since this time: those that are not older.
        limit: Only as many, those with the lowest keys.
        bucket: Only those in this bucket of the store.
        start: Only the window that starts at this time.
        past: Only sessions after this one, in the order of `View.session_order`.
    """

    keys: Sequence[bytes] | None = None
    prefix: bytes = b""
    after: bytes | None = None
    where: pl.Expr | None = None
    older_than_ms: int | None = None
    newer_than_ms: int | None = None
    limit: int | None = None
    bucket: str | None = None
    start: datetime | None = None
    past: WindowKey | None = None

    @property
    def begin(self) -> bytes:
        """The lowest key."""
        if self.past is not None:
            return max(self.prefix, self.past.key)
        return self.prefix if self.after is None else max(self.prefix, self.after + b"\0")

    @property
    def end(self) -> bytes | None:
        """The first key that is too high; None without a limit."""
        head = self.prefix.rstrip(b"\xff")
        return head[:-1] + bytes([head[-1] + 1]) if head else None

    def of_age(self, view: View) -> bool:
        """Whether a state has the age. One that was written after the read began has no time yet, and is newer."""
        by, old, new = view.written_by_ms, self.older_than_ms, self.newer_than_ms
        return (old is None or (by is not None and by < old)) and (new is None or by is None or by >= new)

    def has_session(self, view: View) -> bool:
        """Whether a view of a stage with sessions is one of the sessions."""
        if self.start is not None and (view.window is None or view.window.start != self.start):
            return False
        return self.past is None or view.session_order > (self.past.key, self.past.start)

    def contains(self, key: bytes) -> bool:
        """Whether a key is in the range."""
        return key >= self.begin and (self.end is None or key < self.end)


def condition(given: str | pl.Expr, schema: pl.Schema) -> pl.Expr:
    """Read a condition on the columns of states: SQL as polars reads it, or a polars expression.

    Python code in it is refused, and so is whatever reads several rows: states are read in parts.

    Raises:
        FlowError: It is not a condition on these columns. The text says why and lists them.
    """
    remedy = f"write a condition on {', '.join(schema)}"
    shown = given if isinstance(given, str) else str(given)
    try:
        found = pl.sql_expr(given) if isinstance(given, str) else given
        dtype = pl.DataFrame(schema=schema).select(expression(found).alias("found")).schema["found"]
    except FlowError as error:
        why = "it needs other states than one" if isinstance(given, str) else str(error)
        raise FlowError(f"where: {shown}: {why}; {remedy}") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        why = str(error).partition("\n")[0].partition("; valid columns")[0]
        raise FlowError(f"where: {why}; {remedy}") from None
    if dtype != pl.Boolean:
        raise FlowError(f"where: {shown} is {dtype}, neither true nor false; {remedy}")
    return found


def matching(found: pl.Expr, frame: pl.DataFrame) -> list[bool]:
    """Whether each row matches; a row for which the condition is null does not.

    Raises:
        FlowError: It cannot be evaluated for a row.
    """
    try:
        # The column makes a condition without columns as long as the frame.
        rows = frame.select(pl.first().is_null().alias("row"), found.alias("found"))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:  # the text may quote values
        raise FlowError(
            f"where: the condition cannot be evaluated for a state ({type(error).__name__}); for a cast that may fail use TRY_CAST"
        ) from None
    return rows.get_column("found").fill_null(value=False).to_list()

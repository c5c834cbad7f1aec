"""The windows of a filter that passes on the first record of each, as columns."""

from typing import Any

import polars as pl

from aggregations.definition.system import KEY, TIMESTAMP
from aggregations.errors import FlowError
from envelope.filters.arrival import FromValue
from envelope.filters.distinct import DistinctSession, DistinctTumbling

START, END = "window_start_ms", "window_end_ms"


def window_columns(rule: Any) -> dict[str, pl.Expr]:
    """The window that a record opened, for `map` after `deduplicate`: `flow.deduplicate(rule).map(**window_columns(rule))`.

    Args:
        rule: What `distinct` returned.

    Returns:
        `window_start_ms` and `window_end_ms`, Int64, in milliseconds since 1970: as `Windowed` of `envelope.filters`, which
        `rule.window(element)` returns. They are null for a record without a key.

    Raises:
        FlowError: The filter has no windows, or its time is not that of a column.
    """
    if not isinstance(rule, DistinctSession | DistinctTumbling):
        raise FlowError(f"window_columns() takes a filter that distinct() has made; got {rule!r}")
    if rule.time is None:
        time = pl.col(TIMESTAMP)
    elif isinstance(rule.time, FromValue):
        time = pl.col(rule.time.name)
    else:
        raise FlowError(
            "window_columns(): the filter's time is not in a column: map with a function that calls window()"
        )
    start = time if isinstance(rule, DistinctSession) else time.floordiv(rule.size_ms) * rule.size_ms
    end = start if isinstance(rule, DistinctSession) else start + rule.size_ms
    keyed = pl.col(KEY).is_not_null()
    return {name: pl.when(keyed).then(one) for name, one in ((START, start), (END, end))}

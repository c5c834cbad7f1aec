"""Which dates, times and durations Python's values hold: steps pass columns on as polars' values, or as Python's.

Polars' dates reach beyond the year 9999, and its times count nanoseconds. What only polars can hold would be another value
where an element is folded message by message, so it is refused: nanoseconds in the definition, the rest record by record.
"""

from functools import reduce
from operator import or_
from typing import Any, Final

import polars as pl

from aggregations.errors import FlowError

_MOST_DAYS: Final = 999_999_999
_TEMPORAL: Final = (pl.Date, pl.Time, pl.Datetime, pl.Duration)


def check_held(name: str, dtype: Any) -> None:
    """Check that a column does not count nanoseconds, which Python's dates and durations do not have.

    Raises:
        FlowError: It does.
    """
    if any(getattr(one, "time_unit", "") == "ns" for one in _leaves(dtype)):
        raise FlowError(
            f"column {name!r} is of type {dtype}, whose nanoseconds only some batches would keep: use the integer, or cast it "
            'to microseconds, as in .cast(pl.Datetime("us"))'
        )


def unheld(values: pl.DataFrame) -> pl.Series | None:
    """The rows with a date, a time or a duration that Python's values do not hold; None if there are none."""
    dated = [one for one in values.get_columns() if any(of in _TEMPORAL for of in _leaves(one.dtype))]
    masks = [mask for mask in map(_unheld, dated) if mask.any()]
    return reduce(or_, masks) if masks else None


def _leaves(dtype: Any) -> list[Any]:
    """The types in a type that are not nested."""
    if isinstance(dtype, pl.List | pl.Array):
        return _leaves(dtype.inner)
    if isinstance(dtype, pl.Struct):
        return [leaf for field in dtype.fields for leaf in _leaves(field.dtype)]
    return [dtype]


def _unheld(column: pl.Series) -> pl.Series:
    match column.dtype:
        case pl.Datetime() | pl.Date():
            return column.is_not_null() & ~column.dt.year().is_between(1, 9999).fill_null(value=False)
        case pl.Time():
            return (column.to_physical() % 1_000 != 0).fill_null(value=False)
        case pl.Duration():
            return (column.dt.total_days().abs() > _MOST_DAYS).fill_null(value=False)
    try:
        return column.ne_missing(pl.Series(column.to_list(), dtype=column.dtype))
    except (Exception, pl.exceptions.PanicException):
        if len(column) == 1:
            return pl.Series([True])
        half = len(column) // 2
        return pl.concat([_unheld(column[:half]), _unheld(column[half:])])

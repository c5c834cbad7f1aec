"""Headers that a filter reads, as columns."""

from typing import Final

import polars as pl

from aggregations.definition.system import HEADERS

_HEADER: Final = "_header:"


def header_column(name: str) -> str:
    """Name of a column with the value of a header; not valid as the name of a payload's column."""
    return f"{_HEADER}{name}"


def header_of(column: str) -> str | None:
    """The header whose value a column has; None if it is another column."""
    return column.removeprefix(_HEADER) if column.startswith(_HEADER) else None


def last_value(name: str) -> pl.Expr:
    """The value of the last header of a name, as `FromHeader` extracts it.

    Returns:
        Binary; null for a row without such a header, or whose header has no value.
    """
    header = pl.element().struct
    return pl.col(HEADERS).list.eval(pl.element().filter(header.field("key") == name).struct.field("value")).list.last()

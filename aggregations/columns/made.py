"""Inputs of `Fields` over values that functions made, as columns where their types allow it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from aggregations.columns.arrays import Mask
from aggregations.definition.values import INT64, is_utf8
from envelope import EnvelopeError

_TYPES: Final[Mapping[type, Any]] = {bool: pl.Boolean, int: pl.Int64, float: pl.Float64, str: pl.String}


def made_inputs(
    found: Sequence[Mapping[str, Any] | EnvelopeError], names: Iterable[str]
) -> tuple[pl.DataFrame, Mask] | None:
    """Inputs as columns, and the rows whose inputs cannot be computed.

    Args:
        found: The inputs of each row, or the error.
        names: Names of the inputs.

    Returns:
        None if an input has values of several types, or of a type that has no column here: polars would convert them.
    """
    bad = np.fromiter((isinstance(one, EnvelopeError) for one in found), np.bool_, len(found))
    columns = []
    for name in names:
        values = [None if isinstance(one, EnvelopeError) else one[name] for one in found]
        kinds = set(map(type, values)) - {type(None)}
        if len(kinds) > 1 or not kinds <= _TYPES.keys():
            return None
        kind = next(iter(kinds), bool)
        if kind is int and not all(one is None or -INT64 <= one < INT64 for one in values):
            return None
        if kind is str and not all(one is None or is_utf8(one) for one in values):
            return None
        columns.append(pl.Series(name, values, _TYPES[kind]))
    return pl.DataFrame(columns), bad

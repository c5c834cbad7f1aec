"""The value of a header in each row of a batch."""

import numpy as np
import polars as pl


def last_values(headers: pl.Series, name: str) -> pl.Series:
    """The value of the last header of a name, as `FromHeader` extracts it.

    Args:
        headers: The headers of each row: lists of structs of `key`, a String, and `value`, Binary.
        name: Name of the header.

    Returns:
        Binary; null for a row without such a header, or whose header has no value.
    """
    lengths = headers.list.len().fill_null(0)
    flat = headers.filter(lengths > 0).explode()
    found = np.flatnonzero((flat.struct.field("key") == name).fill_null(value=False).to_numpy())
    if not len(found):
        return pl.repeat(None, len(headers), dtype=pl.Binary, eager=True)
    last = np.full(len(headers), -1)
    # Of several headers in a row, the assignment of the last one remains.
    last[np.searchsorted(np.cumsum(lengths.to_numpy()), found, side="right")] = found
    values = flat.struct.field("value").gather(np.maximum(last, 0))
    return pl.select(pl.when(pl.Series(last >= 0)).then(values)).to_series()

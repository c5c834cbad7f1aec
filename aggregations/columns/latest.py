"""Tables of whole columns: the latest row of each key, as `LatestRow.fold` finds it row by row."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import polars as pl

from aggregations.columns import schema
from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.elements import Elements
from aggregations.columns.fold import Folded
from aggregations.columns.record_text import Values
from aggregations.columns.records import States, Texts
from aggregations.columns.signature import Signature
from aggregations.definition.lookups import LatestRow
from aggregations.definition.values import INT64
from envelope.times import micros_of


def fold_latest(
    fold: LatestRow,
    frame: pl.DataFrame,
    elements: Elements,
    signatures: Sequence[Signature],
    codes: Ints,
    stored: States,
) -> Folded:
    """Fold accepted rows. Of the records of a key in one lane only the last one is looked at.

    Args:
        fold: The fold.
        frame: The rows; those of one key together, in the order of positions.
        elements: The same as elements, for those whose record has a chain.
        signatures: By the codes of `_signature`.
        codes: Number of each row's key.
        stored: The states before.

    Returns:
        The new states. Unfit are the keys whose rows have a value that no state can have, also if a later row replaces it.
    """
    names = [name for name, _ in fold.columns]
    keys = len(stored.exists)
    values, unfit = Values.of(1, keys), np.zeros(keys, np.bool_)
    unfit[codes[_unstorable(frame.select(names))]] = True
    chained = np.array([one.chained for one in signatures], np.bool_)
    lanes = frame.get_column(schema.SIGNATURE).to_numpy()
    rows = _latest(codes, lanes, chained[lanes])
    codes, latest = codes[rows], frame[rows]
    cells = latest.select(names).rows() if names else [()] * len(rows)
    gone = schema.tombstones(latest)
    missing = [False] * len(rows) if gone is None else gone.tolist()
    places = latest.select(schema.SIGNATURE, schema.position(0), schema.TIMESTAMP).rows()
    found = list(zip(rows.tolist(), places, missing, cells, strict=True))
    texts = Texts(values)
    bounds = [*np.flatnonzero(np.diff(codes, prepend=-1)).tolist(), len(codes)]
    for start, end in pairwise(bounds):
        code = int(codes[start])
        if unfit[code]:
            continue
        state = msgspec.json.decode(stored.text(0, code)) if stored.exists[code] else fold.zero()
        for row, (lane, offset, timestamp_ms), no_row, given in found[start:end]:
            if chained[lane]:
                state = fold.fold(state, elements[row])
            else:
                kept = None if no_row else dict(zip(names, given, strict=True))
                fold.put(state, signatures[lane].kept.lane, (offset,), micros_of(timestamp_ms), kept)
        texts.put(0, code, state)
    return Folded(values, texts.joined(), unfit)


def _unstorable(cells: pl.DataFrame) -> Mask:
    """Rows with a value that no state can have: a number that is not finite, or exceeds 64 bits."""
    found: Mask = np.zeros(cells.height, np.bool_)
    for cell in cells:
        if cell.dtype.is_float():
            found |= (~cell.is_finite()).fill_null(value=False).to_numpy()
        elif cell.dtype == pl.UInt64:
            found |= (cell >= INT64).fill_null(value=False).to_numpy()
    return found


def _latest(codes: Ints, lanes: Ints, chained: Mask) -> Ints:
    """The last row of each key and lane, in the order of the first ones; every row whose record has a chain."""
    groups = codes * (int(lanes.max(initial=0)) + 1) + lanes
    # Several routes of chains may be of one lane: such a row is a group of its own.
    groups[chained] = -1 - np.flatnonzero(chained)
    _, first = np.unique(groups, return_index=True)
    _, last = np.unique(groups[::-1], return_index=True)
    found: Ints = len(groups) - 1 - last[np.argsort(first)]
    return found

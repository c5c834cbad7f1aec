"""Sorting of a batch. Columns are combined into one number if they fit into 63 bits."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from aggregations.columns.arrays import Ints
from aggregations.columns.schema import MISSING
from aggregations.columns.signature import Lane
from envelope import Position

_BITS: Final = 63


def fold_order(keys: Ints, positions: Sequence[Ints], lanes: Ints, places: Sequence[Lane]) -> Ints:
    """Return the rows in the order in which a batch is folded: key, position, name of the lane, arrival."""
    names = [place.lane for place in places]
    ranks = np.empty(len(names), np.int64)
    ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    return sorted_rows([keys, *positions, ranks[lanes]])


def sorted_rows(columns: Sequence[Ints]) -> Ints:
    """Return the rows in the order of the columns, the first column first. The sort is stable."""
    rows = len(columns[0])
    packed = np.zeros(rows, np.int64)
    if rows < 2:
        return packed
    bits = 0
    for column in columns:
        lowest = int(column.min())
        needed = (int(column.max()) - lowest).bit_length()
        bits += needed
        if bits > _BITS:
            return np.lexsort(columns[::-1])
        if needed:
            packed = (packed << needed) | (column - lowest)
    if (packed[1:] >= packed[:-1]).all():
        return np.arange(rows)
    needed = (rows - 1).bit_length()
    if bits + needed > _BITS:
        return np.argsort(packed, kind="stable")
    # With the row number in the lowest bits, sorting values sorts rows, several times as fast.
    packed = (packed << needed) | np.arange(rows)
    packed.sort()
    return packed & ((1 << needed) - 1)


def distinct_lanes(lanes: Ints, places: Sequence[Lane]) -> tuple[Ints, list[Lane]]:
    """Renumber lanes so that each has one number, since two routes may lead to one lane."""
    names = [place.lane for place in places]
    if len(set(names)) == len(names):
        return lanes, list(places)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    table = np.array([numbers[name] for name in names], np.int64)
    return table[lanes], list({place.lane: place for place in places}.values())


def positions_of(positions: Sequence[Ints], rows: Ints) -> list[Position]:
    """Return the positions of some rows as in the pure code."""
    components = [component[rows] for component in positions]
    whole = zip(*(component.tolist() for component in components), strict=True)
    if any((component == MISSING).any() for component in components[1:]):
        return [tuple(one for one in position if one != MISSING) for position in whole]
    return list(whole)

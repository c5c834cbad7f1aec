"""Totals, means and extremes of floats over columns: to the last bit what the fold of one value at a time computes."""

from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.records import States, Texts
from aggregations.definition.aggregates import FieldAggregate, Maximum, Mean, Minimum, Total
from persistence.compiled import compiled

SUM, SMALLEST, LARGEST = range(3)
OF_FLOATS: Final[dict[type[FieldAggregate], int]] = {Total: SUM, Mean: SUM, Minimum: SMALLEST, Maximum: LARGEST}
# Integers up to here are floats, too.
_EXACT: Final = 2**53


def fold_floats(
    number: int, field: FieldAggregate, column: pl.Series, keys: Ints, stored: States, texts: Texts, unfit: Mask
) -> None:
    """Fold the floats of one field into the states of their keys.

    Args:
        number: Number of the field.
        field: A total, a mean or an extreme.
        column: Its input.
        keys: Key of every row.
        stored: The states before.
        texts: Receives the new states.
        unfit: Is set for keys that must be folded message by message.
    """
    of, exists = len(stored.exists), stored.exists
    present = np.unique(keys).tolist()
    before: dict[int, Any] = {}
    states, known, folded = np.zeros(of, np.float64), np.zeros(of, np.bool_), np.zeros(of, np.int64)
    for code in present:
        state: Any = msgspec.json.decode(stored.text(number, code)) if exists[code] else field.zero
        before[code] = state
        start = state[0] if isinstance(field, Mean) else state
        if type(start) is float or (type(start) is int and abs(start) <= _EXACT):
            states[code], known[code] = start, True
        elif start is not None:  # of an earlier definition
            unfit[code] = True
    valid = np.require(column.is_not_null().to_numpy(), np.bool_, ["C", "W"])
    floats = np.require(column.cast(pl.Float64).fill_null(0.0).to_numpy(), np.float64, ["C", "W"])
    _fold_numbers(OF_FLOATS[type(field)], keys, floats, valid, states, known, folded, unfit)
    for code in present:
        state, more = before[code], int(folded[code])
        if more and not unfit[code]:
            state = float(states[code])
            if isinstance(field, Mean):
                state = [state, before[code][1] + more]
        texts.put(number, code, state)


@compiled(allocates=False)
def _fold_numbers(
    operation: int,
    keys: Ints,
    numbers: npt.NDArray[np.float64],
    valid: Mask,
    states: npt.NDArray[np.float64],
    known: Mask,
    folded: Ints,
    unfit: Mask,
) -> None:
    """Fold floats one after the other, as `add` does: a sum must not depend on where batches end, not even its last bit.

    Args:
        operation: `SUM`, `SMALLEST` or `LARGEST`.
        keys: Key of every row.
        numbers: The floats.
        valid: Which of them are not null.
        states: State by key.
        known: False for a state that is null.
        folded: Is raised by the floats that have a part in the state: for extremes, by those that replace it.
        unfit: Is set for keys whose total is not finite at some row.
    """
    for row in range(len(keys)):
        if not valid[row]:
            continue
        key, number = keys[row], numbers[row]
        if operation == SUM:
            states[key] += number
            if not np.isfinite(states[key]):
                unfit[key] = True
        elif known[key] and not (number < states[key] if operation == SMALLEST else number > states[key]):
            continue
        else:
            states[key] = number
        known[key] = True
        folded[key] += 1

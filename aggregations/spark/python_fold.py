"""Folds in plain Python over columns: one call per accepted message, one copy of the state per key and batch."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from aggregations.columns.arrays import Ints
from aggregations.columns.elements import Elements
from aggregations.definition.folds import Fold, is_state
from aggregations.per_message.stage import copied


def fold_elements(
    fold: Fold[Any], elements: Elements, codes: Ints, states: Mapping[int, Any]
) -> tuple[dict[int, Any], list[int]]:
    """Fold accepted elements.

    Args:
        fold: The fold.
        elements: The elements; those of one key together, in the order in which they are folded.
        codes: Number of each element's key.
        states: State by key number; keys without one are missing. They are not changed.

    Returns:
        The new states, and the keys whose fold raised or returned something that is not a state: the per-message code
        finds the elements that it cannot fold.
    """
    new: dict[int, Any] = {}
    unfit: list[int] = []
    bounds = [*np.flatnonzero(np.diff(codes, prepend=-1)).tolist(), len(codes)]
    step, at = fold.fold, elements.__getitem__
    for start, end in pairwise(bounds):
        code = int(codes[start])
        state = copied(states[code] if code in states else fold.zero())
        try:
            for row in range(start, end):
                state = step(state, at(row))
                if not is_state(state):
                    unfit.append(code)
                    break
            else:
                new[code] = state
        except Exception:  # the user's code: anything may come
            unfit.append(code)
    return new, unfit

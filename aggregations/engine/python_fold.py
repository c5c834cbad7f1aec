"""Folds in plain Python over columns: one call per accepted message, one copy of the state per key and batch."""

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from aggregations.columns.arrays import Ints
from aggregations.columns.elements import Elements
from aggregations.columns.fold import Folded
from aggregations.columns.record_text import Values
from aggregations.columns.records import States, Texts
from aggregations.definition.folds import Fold, is_state
from aggregations.per_message.folding import copied


def fold_elements(fold: Fold[Any], elements: Elements, codes: Ints, stored: States) -> Folded:
    """Fold accepted elements.

    Args:
        fold: The fold.
        elements: The elements; those of one key together, in the order in which they are folded.
        codes: Number of each element's key.
        stored: The states before.

    Returns:
        The new states. Unfit are the keys whose fold raised or returned something that is not a state: the per-message
        code finds the elements that it cannot fold.
    """
    keys = len(stored.exists)
    values, unfit = Values.of(1, keys), np.zeros(keys, np.bool_)
    texts = Texts(values)
    bounds = [*np.flatnonzero(np.diff(codes, prepend=-1)).tolist(), len(codes)]
    step, at = fold.fold, elements.__getitem__
    for start, end in pairwise(bounds):
        code = int(codes[start])
        # The fold may change its state in place: this copy is its own.
        state = msgspec.json.decode(stored.text(0, code)) if stored.exists[code] else copied(fold.zero())
        try:
            for row in range(start, end):
                state = step(state, at(row))
                if not is_state(state):
                    unfit[code] = True
                    break
        except Exception:  # user code may raise anything
            unfit[code] = True
        if not unfit[code]:
            texts.put(0, code, state)
    return Folded(values, texts.joined(), unfit)

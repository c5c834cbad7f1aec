"""Folds and `emit` in plain Python over columns: one call per accepted message, one copy of the state per key and batch."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from aggregations.columns.arrays import Ints
from aggregations.columns.elements import Elements
from aggregations.columns.fold import Folded
from aggregations.columns.record_text import Values
from aggregations.columns.records import States, Texts
from aggregations.definition.aggregates import At
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Aggregate
from aggregations.definition.folds import copied, returned
from aggregations.per_message.folding import Inputs, usable

_NOWHERE: At = ((), "")


def fold_elements(
    stage: Aggregate,
    elements: Elements,
    codes: Ints,
    stored: States,
    inputs: Sequence[Inputs] = (),
    at: Sequence[At] | None = None,
) -> tuple[Folded, list[list[Any]]]:
    """Fold accepted elements.

    Args:
        stage: The stage. If its fold is `Fields`, it is computed without columns, for the values that `emit` gets.
        elements: The elements; those of one key together, in the order in which they are folded.
        codes: Number of each element's key.
        stored: The states before.
        inputs: Inputs of the `Fields` for each element.
        at: Position and lane of each element, if a field is ordered.

    Returns:
        The new states, and what the function `emit` makes of each element. Unfit are the keys whose fold or `emit` raised
        or returned something that is not a state: the per-message code finds the elements that it cannot fold.
    """
    keys, fold, emit = len(stored.exists), stage.fold, stage.emit
    assert not isinstance(emit, Emit)
    values, unfit = Values.of(1, keys), np.zeros(keys, np.bool_)
    texts, passed = Texts(values), [[] for _ in codes] if emit is not None else list[list[Any]]()
    bounds = [*np.flatnonzero(np.diff(codes, prepend=-1)).tolist(), len(codes)]
    for start, end in pairwise(bounds):
        code = int(codes[start])
        # The fold may change its state in place: this copy is its own.
        state = msgspec.json.decode(stored.text(0, code)) if stored.exists[code] else copied(fold.zero())
        try:
            for row in range(start, end):
                if isinstance(fold, Fields):
                    state = fold.add(state, usable(inputs[row]), _NOWHERE if at is None else at[row])
                else:
                    state = returned(fold.fold(state, elements[row]), state)
                if emit is not None:
                    # Also by value: emitted elements must not change when the state changes later.
                    passed[row] = list(emit(elements[row], copied(state)))
        except Exception:  # user code may raise anything
            unfit[code] = True
        if not unfit[code]:
            texts.put(0, code, state)
    return Folded(values, texts.joined(), unfit), passed

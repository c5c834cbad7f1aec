"""Folds one element into the state of its key, and makes what the stage emits of it."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from aggregations.definition.element import Element
from aggregations.definition.emit import Emit
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Aggregate
from aggregations.definition.folds import copied, returned
from aggregations.definition.schemas import Schema
from aggregations.per_message.arrivals import Arrival
from aggregations.per_message.emitting import emitted_row
from aggregations.per_message.sessions import fold_in_session
from envelope import EnvelopeError

Inputs: TypeAlias = Mapping[str, Any] | EnvelopeError
"""Inputs of a stage's fields for one element, by name, or why they cannot be evaluated."""


def usable(inputs: Inputs) -> Mapping[str, Any]:
    """The inputs of a stage's fields, by name.

    Raises:
        EnvelopeError: They cannot be evaluated.
    """
    if isinstance(inputs, EnvelopeError):
        raise inputs
    return inputs


def inputs_of(arrival: Arrival) -> Mapping[str, Any]:
    """The inputs of an arrival; see `usable`."""
    return usable(arrival.values)


def time_of(element: Element[Any]) -> int:
    """Event time of an element of a stage with windows, in microseconds since 1970."""
    assert element.time_us is not None  # `enter_windows` rejects others
    return element.time_us


def fold_one(stage: Aggregate, state: Any, arrival: Arrival, types: Schema) -> tuple[Any, tuple[Element[Any], ...]]:
    """Fold an arrival into the state of its key; return the state, and what the stage passes on.

    Args:
        stage: The stage.
        state: The state before; the fold may change it in place.
        arrival: The arrival.
        types: Columns of the state, for `Emit`.

    Raises:
        Exception: Whatever the fold, or `emit`, raises.
    """
    if stage.sessions is None:
        return _fold_into(stage, state, arrival, types)
    time_us = time_of(arrival.element)
    return fold_in_session(
        stage, state, time_us, arrival.reached_us, lambda before: _fold_into(stage, before, arrival, types)
    )


def _fold_into(stage: Aggregate, before: Any, arrival: Arrival, types: Schema) -> tuple[Any, tuple[Element[Any], ...]]:
    element, inputs = arrival.element, inputs_of(arrival)
    if isinstance(stage.fold, Fields):
        state = stage.fold.add(before, inputs, (arrival.standing.position, arrival.standing.lane))
    else:
        state = returned(stage.fold.fold(before, element), before)
    if stage.emit is None:
        return state, (element,)
    if isinstance(stage.emit, Emit):
        row = emitted_row(stage, inputs, before, state, types)
        return state, () if row is None else (element.nth(0, row),)
    # Also by value: emitted elements must not change when the state changes later.
    return state, tuple(element.nth(n, value) for n, value in enumerate(stage.emit(element, copied(state))))

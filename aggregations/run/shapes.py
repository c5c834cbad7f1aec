"""States of an earlier definition: whether a stage can continue them, and in which form."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import polars as pl

from aggregations.definition.fields import Fields
from aggregations.definition.flow import Stage
from aggregations.definition.sessions import are_sessions
from aggregations.errors import DefinitionChangedError
from persistence.errors import show_key
from persistence.protocol import StageRef, StateStore
from persistence.record import decode_record

_REMEDY = "Otherwise rebuild the flow (`headwater replay --redefine`)"


def continued(stage: Stage, state: Any, ref: StageRef, key: bytes) -> Any:
    """Convert a state of an earlier definition to the stage's current definition.

    A fold in plain Python receives it unchanged.

    Raises:
        DefinitionChangedError: It does not have the shape of the stage's states.
    """
    if state is None:
        return state
    if misfit := _misfit(stage, state):
        raise DefinitionChangedError(
            f"{ref}, key {show_key(key)}: a state of an earlier definition does not fit: {misfit}. {_REMEDY}"
        )
    fold = stage.aggregate.fold
    if not isinstance(fold, Fields):
        return state
    if stage.aggregate.sessions is None:
        return fold.carried(state)
    return [[start, end, fold.carried(one)] for start, end, one in state]


def check_states(stage: Stage, ref: StageRef, store: StateStore) -> None:
    """Read every state of a stage whose definition has changed, before anything continues one.

    Raises:
        Corrupt: A state cannot be read.
        DefinitionChangedError: Some do not have the shape of the stage's states.
    """
    if not isinstance(stage.aggregate.fold, Fields) and stage.aggregate.sessions is None:
        return
    dtypes = stage.input_types()
    found = unfit = 0
    example = ""
    for key, stored in store.scan(ref):
        state = decode_record(stored.value, ref, key).state
        found += 1
        if state is not None and (misfit := _misfit(stage, state, dtypes)):
            unfit += 1
            example = example or f"for example of key {show_key(key)}: {misfit}"
    if unfit:
        raise DefinitionChangedError(
            f"{ref}: {unfit:,} of {found:,} states do not fit its new definition, {example}. {_REMEDY}"
        )


def _misfit(stage: Stage, state: Any, dtypes: Mapping[str, pl.DataType] = MappingProxyType({})) -> str:
    """Explain why a state cannot be continued; empty when it can."""
    fold, states = stage.aggregate.fold, [state]
    if stage.aggregate.sessions is not None:
        if not are_sessions(state):
            return "the state was not made by a stage with sessions"
        states = [one for _, _, one in state]
    return next((text for one in states if isinstance(fold, Fields) and (text := fold.misfit(one, dtypes))), "")

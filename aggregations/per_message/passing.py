"""What a stage passes on of a redriven record that it holds: what it passed on when a later stage rejected the record.

Only those items stand for a dead letter that were rejected with it. A sibling that the stage did not pass on, because its
window was closed, or because a filter dropped it, is not passed on now.

If `emit` reads the state, the state has to be the one from before the record. The ledger lists the rejected record before
anything of its batch is written, so a stage finds it there when it folds the record, and keeps the state from before it
beside the state that it writes, until the record is no longer listed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from aggregations.definition.element import Element
from aggregations.definition.emit import Emit
from aggregations.definition.folds import copied
from aggregations.definition.operators import Aggregate
from aggregations.definition.schemas import Schema
from aggregations.per_message.arrivals import Arrival, names_of
from aggregations.per_message.emitting import emitted_row
from aggregations.per_message.folding import fold_one, inputs_of, time_of
from aggregations.per_message.ledger import Entry, Waiting
from aggregations.per_message.sessions import state_at
from envelope import EnvelopeError, Position, Reason

Kept: TypeAlias = Mapping[str, Mapping[Position, Any]]
"""States of a fold from before records that later stages have rejected, by group or original topic-partition, and position."""

KEPT_BYTES: Final = 1 << 16
"""Size of the kept states of one key, as JSON. The earliest ones give way."""


def keeping(kept: Kept, before: Sequence[tuple[Arrival, Any]], waiting: Waiting) -> Kept:
    """The states that are kept after a batch: without those of records that are no longer listed.

    Args:
        kept: The states kept before.
        before: Arrivals that wait, each with the state before it, in the order in which they were folded.
        waiting: What is listed at later stages.
    """
    found = {
        (name, position): state
        for name, states in kept.items()
        for position, state in states.items()
        if (name, position[0]) in waiting
    }
    for arrival, state in before:
        found |= dict.fromkeys(arrival.waits, state)
    sizes = {at: len(msgspec.json.encode(state)) for at, state in found.items()}
    room, total = KEPT_BYTES, dict[str, dict[Position, Any]]()
    for name, position in reversed(found):
        room -= sizes[name, position]
        if room >= 0:
            total.setdefault(name, {})[position] = found[name, position]
    return total


def passed_again(stage: Aggregate, state: Any, kept: Kept, arrival: Arrival, types: Schema) -> tuple[Element[Any], ...]:
    """What a stage passes on of an arrival in transit.

    Args:
        stage: The stage.
        state: Its state as it is now; None without one.
        kept: The states that it keeps.
        arrival: The arrival.
        types: Columns of the state, for `Emit`.

    Raises:
        EnvelopeError: `FOLD_FAILED`: the state from before it is not kept, and by the present one it is not passed on.
        Exception: Whatever the fold, or `emit`, raises.
    """
    if arrival.sibling:
        return ()
    if stage.emit is None:
        return (arrival.element,)
    for name, position in names_of(arrival.element, arrival.standing, arrival.redriven):
        if (before := kept.get(name, {}).get(position)) is not None:
            return fold_one(stage, copied(before), arrival, types)[1]
    made = _made_now(stage, state, arrival, types)
    if stage.emits_state and any(_index(entry, arrival) >= len(made) for entry in arrival.entries):
        raise EnvelopeError(
            Reason.FOLD_FAILED, f"stage {stage.name} no longer has the state from before it, which emit= needs"
        )
    return made


def _made_now(stage: Aggregate, state: Any, arrival: Arrival, types: Schema) -> tuple[Element[Any], ...]:
    """What `emit` makes of an arrival and the state as it is now."""
    element = arrival.element
    state = copied(stage.zero() if state is None else state)
    if stage.sessions is not None:
        state = state_at(stage, state, time_of(element))
    if isinstance(stage.emit, Emit):
        always = stage.emits_state  # its condition was true, of another state
        row = emitted_row(stage, inputs_of(arrival), state, state, types, always=always)
        return () if row is None else (element.nth(0, row),)
    assert stage.emit is not None
    return tuple(element.nth(n, value) for n, value in enumerate(stage.emit(element, state)))


def _index(entry: Entry, arrival: Arrival) -> int:
    """Index of the emitted item that an entry belongs to; 0 if it stands for all of them."""
    standing = arrival.standing
    at, own = (
        [one for one in position if not isinstance(one, str)]
        for position in (
            entry.position,
            standing.position if entry.group == standing.group else (0, *arrival.element.indices),
        )
    )
    return int(at[len(own)]) if len(at) > len(own) else 0

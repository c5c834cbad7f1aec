"""Bugs of a stage: how a batch is judged and folded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from aggregations.definition.element import Element
from aggregations.definition.sessions import near
from aggregations.per_message import arrivals, loop, sessions, stage
from aggregations.per_message.stage import KeyState, StageOutcome, fold_stage
from envelope import Decision, Histories, Siblings, Standing
from tests.simulation.patch import Patch, original


def _keys_apart(of: Any, loaded: Mapping[bytes, KeyState], arrivals: Sequence[Any], **options: Any) -> StageOutcome:
    """Folds every key by itself: a record whose item fails under one key is folded under the others."""
    states_by_key: dict[bytes, KeyState] = {}
    decided: dict[int, Any] = {}
    for key in sorted({one.key for one in arrivals}):
        rows = [i for i, one in enumerate(arrivals) if one.key == key]
        outcome = fold_stage(of, loaded, [arrivals[i] for i in rows], **options)
        states_by_key |= outcome.states
        decided |= zip(rows, outcome.decided, strict=True)
    return StageOutcome(states_by_key, [decided[i] for i in range(len(arrivals))])


def _trusts_the_first_stage(of: Any, loaded: Any, arrivals: Any, **options: Any) -> StageOutcome:
    """Judges at the first stage only."""
    if of.name == "s0":
        return fold_stage(of, loaded, arrivals, **options)
    fresh = {key: replace(state, histories=Histories(state.histories.lanes, {})) for key, state in loaded.items()}
    numbers = count()
    apart = [
        replace(one, standing=replace(one.standing, lane=f"{one.standing.lane}~{options['batch']}.{next(numbers)}"))
        for one in arrivals
    ]
    return fold_stage(of, fresh, [replace(one, standing=replace(one.standing, group="~")) for one in apart], **options)


def _arrive_without_ids(*arguments: Any, **options: Any) -> Any:
    return arrivals.arrive(*arguments, **{**options, "siblings": Siblings.DROP})


_judge = original(Histories, "judge")
_folding = original(Histories, "folding")


def _floor_moves(self: Histories, arrivals: Sequence[Standing], siblings: Siblings = Siblings.EVENT_ID) -> Any:
    """Judges one by one, in any order, by histories that move on with each."""
    decisions: list[Decision] = []
    current = self
    for one in reversed(arrivals):
        [decision] = _judge(current, [one], siblings)
        decisions.append(decision)
        if decision.fold:
            current, _ = _folding(current, [one], size=2)
    return decisions[::-1]


def _no_index(self: Element[Any], index: int, value: Any) -> Element[Any]:
    return replace(self, value=value)


def _joins_one(held: Sequence[Any], time_us: int, gap_us: int) -> slice:
    """An element joins one session at most."""
    place = near(held, time_us, gap_us)
    return slice(place.start, min(place.start + 1, place.stop))


def _forgets_positions(
    of: Any, loaded: Mapping[bytes, KeyState], arrivals: Sequence[Any], **options: Any
) -> StageOutcome:
    """A session that two sessions become has the positions of its batch only, as a state with a new key would."""
    outcome, states = fold_stage(of, loaded, arrivals, **options), {}
    for key, state in outcome.states.items():
        before = loaded.get(key)
        if of.sessions and before and len(state.fold or ()) < len(before.fold or ()):
            alone = fold_stage(of, {}, [one for one in arrivals if one.key == key], **options)
            state = replace(state, histories=alone.states[key].histories)
        states[key] = state
    return replace(outcome, states=states)


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "event-id-ignored": (
        "siblings without an index are told apart by nothing",
        [(loop, "arrive", _arrive_without_ids)],
    ),
    "floor-moves-in-batch": ("a batch is judged one by one, unsorted", [(Histories, "judge", _floor_moves)]),
    "half-a-fold-kept": ("a fold that fails half-way leaves its traces", [(stage, "copied", lambda state: state)]),
    "partial-flat-map": ("items of a failed record are folded under other keys", [(loop, "fold_stage", _keys_apart)]),
    "flat-map-without-index": ("items of a flat-map all have the record's own position", [(Element, "nth", _no_index)]),
    "session-joins-one": ("an element joins one of two sessions only", [(sessions, "near", _joins_one)]),
    "merge-forgets-positions": (
        "two sessions that become one forget positions",
        [(loop, "fold_stage", _forgets_positions)],
    ),
    "first-stage-trusted": ("only the first stage drops duplicates", [(loop, "fold_stage", _trusts_the_first_stage)]),
}

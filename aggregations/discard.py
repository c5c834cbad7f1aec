"""Giving up dead letters: their holes are filled as if they had been folded, and nothing is folded."""

from collections.abc import Sequence
from dataclasses import replace

from aggregations.element import Record
from aggregations.flow import Stage
from aggregations.run import Run
from aggregations.source import RecordDecoder
from aggregations.stage import Arrival, KeyState, fold_stage
from aggregations.states import load_states, save_states
from aggregations.steps import Applied, apply_steps, arrive
from envelope import EnvelopeError, Node
from persistence.faults import effect
from persistence.steps import Step


def fill_holes(run: Run, records: Sequence[Record], *, apply: bool) -> dict[Node, int | EnvelopeError]:
    """Fill the holes that redriven records would fill, without folding them.

    A state holds the position afterwards: copies that come later are dropped, or are dead letters again. It takes
    nothing from the record, and nor does any stage behind it.

    Args:
        run: A run that holds the term; with `apply` False one that only looks will do.
        records: Dead letters as `jobs.redrive.redriven` makes them, each at a place of its own.
        apply: Write it.

    Returns:
        By coordinates the number of holes; 0 for a record that has none (any more). Or why the flow's steps do
        not take the record: then nobody knows its key.

    Raises:
        StoreError: A store does not answer, or a newer run has begun.
        DefinitionChangedError: A state was made by another definition of its stage.
    """
    flow = run.flow
    assert flow.topic is not None
    decoder = RecordDecoder(flow.topic, flow.columns)
    filled: dict[Node, int | EnvelopeError] = {}
    elements = []
    for record in records:
        try:
            read = decoder.decode(record)
        except EnvelopeError as error:
            filled[record.node] = error
            continue
        filled[record.node] = 0
        # By the coordinates that the caller knows it by, also where the source has a cluster.
        elements.append(replace(read.element(record.headers), own=record.node))
    applied = Applied(elements, flow.topic.schema)
    for stage in flow.stages:
        applied = apply_steps(stage.before, applied.elements, applied.schema)
        arrivals = arrive(
            stage.aggregate,
            applied,
            topic_ids=run.topic_ids,
            incarnation=lambda _topic, _topic_id: None,
            siblings=flow.topic.siblings,
            later=flow.behind(stage),
        )
        filled |= {one.element.own: EnvelopeError(one.reason, one.detail) for one in applied.rejected}
        loaded = load_states(run, stage, list(dict.fromkeys(arrival.key for arrival in arrivals)))
        _fill(run, stage, loaded, arrivals, filled, apply=apply)
        passing = [arrival for arrival in arrivals if arrival.transit]
        outcome = fold_stage(stage.aggregate, loaded, passing, batch=run.batch)
        emitted = [element for one in outcome.decided for element in one.emitted]
        applied = Applied(emitted, applied.schema if stage.aggregate.emit is None else None)
    return filled


def _fill(
    run: Run,
    stage: Stage,
    loaded: dict[bytes, KeyState],
    arrivals: Sequence[Arrival],
    filled: dict[Node, int | EnvelopeError],
    *,
    apply: bool,
) -> None:
    """Fill what the arrivals of one stage left, and count it."""
    changed: dict[bytes, KeyState] = {}
    for arrival in arrivals:
        key, standing, own = arrival.key, arrival.standing, arrival.element.own
        state = changed.get(key) or loaded.get(key)
        count = filled[own]
        if arrival.transit or state is None or isinstance(count, EnvelopeError):
            continue
        if standing.position not in state.windows.holes.get(standing.group, ()):
            continue
        windows, _ = state.windows.folding(
            [standing], size=stage.aggregate.window, lanes=stage.aggregate.lanes, batch=run.batch
        )
        # From now on it holds a position, so it must have a state to go on from.
        fold = state.fold if state.folded else stage.aggregate.fold.zero()
        changed[key] = replace(state, fold=fold, windows=windows)
        filled[own] = count + 1
    if apply and changed:
        effect(Step.PERSIST.of(stage.name), lambda: save_states(run, stage, changed))

"""States that were spoiled and mended continue like states that never were."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.flow import Stage
from aggregations.per_message.stage import KeyState
from aggregations.run.begin import look
from aggregations.run.memory import MemoryRunner
from aggregations.run.mend import check_can_mend
from aggregations.run.states import save_states
from envelope import Histories
from jobs.mending import MENDS, Sides, apply_mends
from tests.property.test_refolding import Event, compared, flow, folded, logs, read

STAGES = ("visit", "kept", "window", "activity", "carrier")


def cut(found: Sequence[Sequence[Event]], data: st.DataObject) -> list[Sequence[Event]]:
    """A beginning of each log."""
    return [log[: data.draw(st.integers(0, len(log)))] for log in found]


def wrong(state: Any) -> Any:
    """Another state of the same shape."""
    if isinstance(state, list):
        return [[start, end, wrong(one)] for start, end, one in state]
    return state if state is None else {**state, "n": state["n"] + 5}


def spoil(run: MemoryRunner, stage: Stage, data: st.DataObject) -> None:
    """Replace some states of a stage, their positions, or both; add states of keys that there are not."""
    states, spoiled = run.states(stage.name), dict[bytes, KeyState]()
    for key, state in sorted(states.items()):
        what = data.draw(st.sampled_from(["", "result", "positions", "all", "added"]))
        if what in ("result", "all"):
            spoiled[key] = replace(state, fold=wrong(state.fold))
        if what in ("positions", "all"):
            spoiled[key] = replace(spoiled.get(key, state), histories=Histories({}, state.histories.holes))
        if what == "added" and stage.aggregate.window is None:
            spoiled[b"added " + key] = replace(state, version=0)
    save_states(run.run, stage, spoiled)


def mend_all(live: MemoryRunner, truth: MemoryRunner, stage: str) -> dict[bytes, str]:
    """Mend every key of a stage by another fold of the same history."""
    chosen = live.flow.stage(stage)
    window = chosen.aggregate.window
    states = [*live.states(stage), *truth.states(stage)]
    keys = {key if window is None else window.stage_key(key) for key in states}
    with closing(look(live.flow, live.run.urls)) as run:
        check_can_mend(run, MENDS)
        mends = Sides.of(run, truth.run, chosen, keys).mends(run.batch)
        apply_mends(run, chosen, mends, why="", publish=lambda _: None)
    return {one.key: one.mending.value for one in mends}


@settings(max_examples=60, deadline=None)
@given(found=logs(), data=st.data())
def test_spoiled_states_that_are_mended_go_on_like_those_of_a_run_without_an_error(
    found: list[list[Event]], data: st.DataObject
) -> None:
    begin, stage = cut(found, data), data.draw(st.sampled_from(STAGES))
    live = folded(flow(), begin, data)
    spoil(live, live.flow.stage(stage), data)
    live.close()
    with closing(folded(flow(), begin, data)) as truth:
        mend_all(live, truth, stage)
        assert mend_all(live, truth, stage) == {}
    ends = {"legs": lambda: dict(enumerate(map(len, found)))}
    with (
        closing(MemoryRunner(flow(), live.run.urls, ends={}, whole=ends)) as goes_on,
        closing(folded(flow(), found, data)) as never,
    ):
        read(goes_on, found, data)
        assert compared(goes_on, never).differences == 0

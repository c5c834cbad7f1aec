"""What a reader sees of the state of a key: one result, or one for each of its sessions."""

from collections.abc import Callable
from typing import Any, NamedTuple

from aggregations.definition.operators import Aggregate
from aggregations.definition.sessions import row_key
from aggregations.definition.windows import WindowKey


class Result(NamedTuple):
    """What a reader sees of a state.

    Attributes:
        key: Key of the state; in a stage with sessions followed by the first and last time of the session.
        window: Key of the stage, and start and end of the window or session; None without windows.
        state: Result of the fold.
    """

    key: bytes
    window: WindowKey | None
    state: Any


def results_of(stage: Aggregate, key: bytes, state: Any, result: Callable[[Any], Any] | None = None) -> list[Result]:
    """The results of the state of a key.

    Args:
        stage: The stage.
        key: Key of the state.
        state: State of the key; None if nothing was folded.
        result: Another function of the state of the fold than the fold's `result`.
    """
    read = getattr(stage.fold, "result", lambda state: state) if result is None else result
    if stage.sessions is None:
        window = None if stage.window is None else stage.window.split(key)
        return [Result(key, window, None if state is None else read(state))]
    windows = [(stage.sessions.key_of(key, start, end), one) for start, end, one in state or ()]
    return [Result(row_key(window), window, read(one)) for window, one in windows]

"""Sessions, message by message: which of them an element joins, and the state that it is folded into."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from aggregations.definition.folds import copied
from aggregations.definition.operators import Aggregate
from aggregations.definition.sessions import MOST_SESSIONS, TOO_MANY, Sessions, near
from envelope import EnvelopeError, Reason

T = TypeVar("T")


def fold_in_session(
    stage: Aggregate,
    sessions: Sessions,
    time_us: int,
    reached_us: int | None,
    fold: Callable[[Any], tuple[Any, T]],
) -> tuple[Sessions, T]:
    """Fold an element into its session. Sessions that it connects become one.

    Args:
        stage: The stage.
        sessions: Its sessions of the key; the list is changed if the element can be folded.
        time_us: Time of the element.
        reached_us: The latest event time of its partition's log up to it. Sessions that this log lets leave do not count.
        fold: Given the state of the session before the element, returns the one after it and what the stage passes on.

    Raises:
        EnvelopeError: `TOO_MANY_SESSIONS`, or that of a merge.
    """
    assert stage.sessions is not None
    place = near(sessions, time_us, stage.sessions.gap_us)
    joined = sessions[place]
    if not joined and stage.sessions.kept(sessions, reached_us) >= MOST_SESSIONS:
        raise EnvelopeError(Reason.TOO_MANY_SESSIONS, TOO_MANY)
    state, emitted = fold(_merged(stage, joined))
    start, end = (min(time_us, joined[0][0]), max(time_us, joined[-1][1])) if joined else (time_us, time_us)
    sessions[place] = [[start, end, state]]
    return sessions, emitted


def state_at(stage: Aggregate, sessions: Sessions, time_us: int) -> Any:
    """The state of the session that contains a time; the fold's zero if there is none."""
    assert stage.sessions is not None
    return _merged(stage, sessions[near(sessions, time_us, stage.sessions.gap_us)])


def _merged(stage: Aggregate, joined: Sequence[Any]) -> Any:
    fold: Any = stage.fold
    if not joined:
        return copied(fold.zero())
    state = joined[0][2]
    for _, _, other in joined[1:]:
        state = fold.merge(state, other)
    return state

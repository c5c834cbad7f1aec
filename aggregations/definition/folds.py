"""Folds in plain Python: the per-message path."""

from collections.abc import Iterable
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

from aggregations.definition.element import Element
from aggregations.definition.json_types import MAX_DEPTH
from aggregations.definition.values import INT64, is_utf8
from envelope import EnvelopeError, Reason

S = TypeVar("S")

_CONTAINERS: Final = frozenset({dict, list})
_TEXT: Final = frozenset({str})


@runtime_checkable
class Fold(Protocol[S]):
    """A fold written as a class.

    The state must be a value that a JSON round trip preserves: None, booleans, 64-bit integers, finite floats, text,
    lists and dictionaries with text keys, of exactly these types, at most 500 levels deep. It is passed by value, so
    `fold` may change it in place, but not the element, nor what is in it. `fold` must depend only on its arguments. If it
    raises, the element goes to the dead-letter topic.

    An optional `result(state)` returns the state as readers see it. In a stage with session windows, `merge(state, other)`
    returns the state of the elements of both, whichever were folded first; it gets both by value. Changing the code of the
    class changes the stage's definition hash.
    """

    def zero(self) -> S:
        """The state before anything was folded."""
        ...

    def fold(self, state: S, element: Element[Any]) -> S:
        """Return the state with one more element."""
        ...


def check_state(state: Any) -> None:
    """Check that a JSON round trip preserves a state.

    A tuple would come back as a list, a `Counter` as a plain dictionary: after the end of a batch the fold
    would receive another type than within it, and the result would depend on where batches end.

    Raises:
        EnvelopeError: `NOT_FINITE`, `OVERFLOW` or `FOLD_FAILED`.
    """
    _check((state,), 0)


def _check(values: Iterable[Any], depth: int) -> None:
    for one in values:
        kind = type(one)
        if kind is int:
            if not -INT64 <= one < INT64:
                raise EnvelopeError(Reason.OVERFLOW, "an integer in the state exceeds 64 bits")
        elif kind is str:
            if not (one.isascii() or is_utf8(one)):
                raise EnvelopeError(Reason.FOLD_FAILED, "a string in the state contains an unpaired surrogate")
        elif kind is float:
            if one - one != 0:
                raise EnvelopeError(Reason.NOT_FINITE, "a number in the state is NaN or infinite")
        elif kind is dict or kind is list:
            if depth == MAX_DEPTH:
                raise EnvelopeError(Reason.FOLD_FAILED, f"the state is nested deeper than {MAX_DEPTH} levels")
            if kind is list:
                _check(one, depth + 1)
                continue
            if not _TEXT.issuperset(map(type, one)):
                raise EnvelopeError(Reason.FOLD_FAILED, "a dictionary in the state has a key that is not a string")
            _check(one, depth)
            _check(one.values(), depth + 1)
        elif one is not None and kind is not bool:
            raise EnvelopeError(
                Reason.FOLD_FAILED,
                f"the state contains a {kind.__name__}, which JSON does not preserve; use lists, dictionaries, text and "
                "numbers",
            )


def copied(state: Any) -> Any:
    """A copy of a state, as it would be after it was stored and loaded."""
    return msgspec.json.decode(msgspec.json.encode(state))


def returned(state: Any, given: Any) -> Any:
    """What a fold returned, checked, and by value: as if each element were a batch of its own.

    A list that the state shares with an element would change the element when the state changes later, and a list that
    is in the state twice would be two after the end of the batch.

    Args:
        state: What the fold returned.
        given: The state that it was given.

    Raises:
        EnvelopeError: As `check_state`.
    """
    if type(state) is dict and _is_flat(state):  # nothing in it can be shared
        return state if state is given else state.copy()
    check_state(state)
    return copied(state) if type(state) in _CONTAINERS else state


def _is_flat(state: dict[Any, Any]) -> bool:
    """Whether a dictionary is a state without lists and dictionaries in it. Of some that are, it says no."""
    for name, one in state.items():
        kind = type(one)
        if kind is int:
            if not -INT64 <= one < INT64:
                return False
        elif kind is float:
            if one - one != 0:
                return False
        elif kind is str:
            if not one.isascii():
                return False
        elif one is not None and kind is not bool:
            return False
        if type(name) is not str or not name.isascii():
            return False
    return True

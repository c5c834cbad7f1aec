"""Folds in plain Python: the per-message path."""

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, runtime_checkable

from aggregations.definition.element import Element
from aggregations.definition.values import INT64, is_utf8
from envelope import EnvelopeError, Reason

S = TypeVar("S")


@runtime_checkable
class Fold(Protocol[S]):
    """A fold written as a class.

    The state must be a value that a JSON round trip preserves: None, booleans, 64-bit integers, finite floats, text,
    lists and dictionaries with text keys, of exactly these types. It is passed by value, so `fold` may
    change it in place. `fold` must depend only on its arguments. If it raises, the element goes to the
    dead-letter topic.

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
    kind = type(state)
    if kind is int:
        if not -INT64 <= state < INT64:
            raise EnvelopeError(Reason.OVERFLOW, "an integer in the state exceeds 64 bits")
    elif kind is float:
        if state - state != 0:
            raise EnvelopeError(Reason.NOT_FINITE, "a number in the state is NaN or infinite")
    elif kind is str:
        if not is_utf8(state):
            raise EnvelopeError(Reason.FOLD_FAILED, "a string in the state contains an unpaired surrogate")
    elif kind is list:
        for one in state:
            check_state(one)
    elif kind is dict:
        for name, one in state.items():
            if type(name) is not str:
                raise EnvelopeError(Reason.FOLD_FAILED, "a dictionary in the state has a key that is not a string")
            check_state(name)
            check_state(one)
    elif kind is not bool and state is not None:
        raise EnvelopeError(
            Reason.FOLD_FAILED,
            f"the state contains a {kind.__name__}, which JSON does not preserve; use lists, dictionaries, text and numbers",
        )


def is_state(state: Any) -> bool:
    """Whether `check_state` accepts a state, at a fraction of its cost."""
    kind = type(state)
    if kind is dict:
        for name in state:
            if type(name) is not str or not (name.isascii() or is_utf8(name)):
                return False
        return _are_states(state.values())
    return _are_states(state) if kind is list else _are_states((state,))


def _are_states(values: Iterable[Any]) -> bool:
    for one in values:
        kind = type(one)
        if kind is int:
            if not -INT64 <= one < INT64:
                return False
        elif kind is str:
            if not (one.isascii() or is_utf8(one)):
                return False
        elif kind is float:
            if one - one != 0:
                return False
        elif kind is dict or kind is list:
            if not is_state(one):
                return False
        elif one is not None and kind is not bool:
            return False
    return True

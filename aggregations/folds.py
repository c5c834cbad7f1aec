"""Folds in plain Python: the per-message path."""

import ast
import hashlib
import inspect
import textwrap
from typing import Any, Protocol, TypeVar, runtime_checkable

from aggregations.element import Element

S = TypeVar("S")


@runtime_checkable
class Fold(Protocol[S]):
    """A fold written as a class.

    The state is what JSON can hold: None, booleans, 64-bit integers, finite floats, text, lists and
    dictionaries with text keys. It is handed over by value, so `fold` may change it in place. `fold`
    must depend on nothing but its arguments. A raise sends the element to the dead-letter topic.

    An optional `result(state)` makes of the state what readers see. Changing the code of the class
    changes the stage's definition hash.
    """

    def zero(self) -> S:
        """The state before anything was folded."""
        ...

    def fold(self, state: S, element: Element[Any]) -> S:
        """The state with one element more."""
        ...


def describe(fold: object) -> str:
    """Canonical text of a fold in plain Python: its name, its code without comments and its arguments."""
    kind = type(fold)
    arguments = dict(sorted(getattr(fold, "__dict__", {}).items()))
    return f"{kind.__module__}.{kind.__qualname__}#{_code(kind)}{arguments or ''}"


def _code(of: type) -> str:
    """Hash of the code, independent of comments and layout; of nothing where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(of)))
    except (OSError, TypeError, SyntaxError):
        return "no-source"
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]

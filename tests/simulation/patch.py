"""Replaces attributes temporarily."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Patch = tuple[object, str, Any]
"""Owner, attribute, and its temporary value."""


def original(owner: object, attribute: str) -> Any:
    """The function that a patch replaces; call this before patching."""
    found = vars(owner)[attribute]
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply patches while the block runs."""
    with ExitStack() as stack:
        for owner, attribute, value in patches:
            stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            setattr(owner, attribute, value)
        yield

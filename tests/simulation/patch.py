"""What is put in the place of something for a while."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Patch = tuple[object, str, Any]
"""Owner, attribute, and what stands there meanwhile."""


def original(owner: object, attribute: str) -> Any:
    """The function that a patch replaces, as it was when this was imported."""
    found = vars(owner)[attribute]
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Put everything in its place until the block ends."""
    with ExitStack() as stack:
        for owner, attribute, value in patches:
            stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            setattr(owner, attribute, value)
        yield

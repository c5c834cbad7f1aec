"""Bugs planted on purpose, each a patch of the real code at run time: what a proof is worth that does not find them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from aggregations.simulation.bugs import BUGS

__all__ = ["BUGS", "planted"]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug until the block ends."""
    with ExitStack() as stack:
        for owner, attribute, value in BUGS[name][1]:
            before = vars(owner)[attribute]
            stack.callback(setattr, owner, attribute, before)
            setattr(owner, attribute, value)
        yield

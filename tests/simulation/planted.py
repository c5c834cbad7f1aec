"""Bugs planted on purpose, each a patch of the real code at run time. The simulation must find them."""

from contextlib import AbstractContextManager

from tests.simulation.bugs import BUGS
from tests.simulation.patch import patched

__all__ = ["BUGS", "planted"]


def planted(name: str) -> AbstractContextManager[None]:
    """Plant a bug while the block runs."""
    return patched(BUGS[name][1])

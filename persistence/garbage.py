"""Python's cyclic garbage collector, and work that it would slow down."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage meanwhile.

    Whatever makes many objects that live together, and no cycles, is slowed down: the collector walks through all of them
    again and again. That took half of a republisher's time, and half as much time as the histories of a batch.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

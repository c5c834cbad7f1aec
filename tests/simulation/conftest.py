"""Worlds leave little garbage that is in cycles: a quarter of the time went into looking for it."""

import gc
from collections.abc import Iterator

import pytest

from tests.simulation.prove import collect_rarely


@pytest.fixture(autouse=True, scope="module")
def few_collections() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.collect()
    collect_rarely()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)

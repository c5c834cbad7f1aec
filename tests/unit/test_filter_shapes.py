"""The benchmark's shapes with a filter fold each event once, batch by batch, without a broker."""

import argparse
from typing import Any

import pytest

from aggregations.engine.roots import RootTopics
from benchmarks.filters import Shape
from benchmarks.shapes import FILTERS

SMALL = argparse.Namespace(rows=300, keys=20, batches=2)


@pytest.mark.parametrize("name", FILTERS)
def test_what_is_sent_again_is_dropped_by_the_filter_of_a_shape(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RootTopics, "_ask", lambda *_: None)  # there is no broker to ask
    shape: Any = Shape(name, SMALL)
    for number, batch in enumerate(shape.batches):
        shape.bench.process(batch, number)
    assert shape.folded() == shape.unique < SMALL.rows * SMALL.batches

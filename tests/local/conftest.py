"""Topics and stores of a flow that runs without Spark."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aggregations.local import executor, run_local
from tests.support.world import World


@pytest.fixture(params=[0, executor.FEW_RECORDS], ids=["compiled", "by message"])
def world(
    request: pytest.FixtureRequest,
    kafka: str,
    topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    """A topic of two partitions, a dead-letter topic and a store; batches of few records are folded in one of two ways."""
    monkeypatch.setattr(executor, "FEW_RECORDS", request.param)
    made = World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, runner=run_local)
    with closing(made) as world:
        yield world

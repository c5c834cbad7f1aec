"""Topics and stores of a flow that runs without Spark."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aggregations.local import executor, run_local
from tests.support.world import World

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of two ways `make test` runs the one that fits a flow's path; if none is given, the one that Spark does not have."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.path.parent == HERE and "world" in params:
            compiled, columns = not params["world"], params.get("path", "messages") != "messages"
            if compiled != columns and ("path" in params or item.path.stem == "test_as_on_spark"):
                item.add_marker("kills")


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

"""One Spark context for all tests in here: it takes ten seconds to start."""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyspark import SparkContext

from aggregations.spark.session import session
from tests.support.world import World


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkContext]:
    """The context that `run_flow` finds."""
    with session("headwater tests") as found:
        yield found


@pytest.fixture
def world(spark: SparkContext, kafka: str, topic: Callable[..., str], tmp_path: Path) -> Iterator[World]:
    """A topic of two partitions, a dead-letter topic and a store."""
    with closing(World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path)) as world:
        yield world

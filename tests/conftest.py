"""Real servers for the tests that need one: started once per run, shared by its workers, and stopped at its end."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from xdist.scheduler import LoadFileScheduling

from jobs import stack
from jobs.environment import STACK_JAVA_OPTIONS
from jobs.stack import topics
from tests.support.spark import JAVA_OPTIONS

_ROOT = "HEADWATER_TEST_STACK"
_WORLDS = "tests/simulation/"

# The same examples in every run; `make explore` tries new ones. A busy machine is not a failure.
settings.register_profile("pinned", derandomize=True, deadline=None, print_blob=True, max_examples=32)
settings.register_profile("explore", derandomize=False, deadline=None, print_blob=True, max_examples=2_000)
# For `make mutants`: any failure is enough; examples are not shrunk.
settings.register_profile(
    "mutants", derandomize=True, deadline=None, database=None, max_examples=25, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("pinned")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if not _is_worker(config):
        os.environ[STACK_JAVA_OPTIONS] = JAVA_OPTIONS
        os.environ[_ROOT] = tempfile.mkdtemp(prefix="headwater-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _is_worker(config) and (root := os.environ.pop(_ROOT, None)):
        stack.down(Path(root))
        shutil.rmtree(root, ignore_errors=True)
        del os.environ[STACK_JAVA_OPTIONS]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow files first and simulated worlds last, so that all workers end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.nodeid.startswith(_WORLDS), item.path not in slow))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "_Files | None":
    return _Files(config, log) if config.getvalue("dist") == "loadfile" else None


class _Files(LoadFileScheduling):
    """Distributes whole files, whose tests share servers; simulated worlds share nothing and are distributed singly."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(_WORLDS) else str(super()._split_scope(nodeid))


def _up(**wanted: bool) -> stack.StackState:
    return stack.up(Path(os.environ[_ROOT]), **{"kafka": False, **wanted})


@pytest.fixture(scope="session")
def kafka() -> str:
    """Bootstrap address of a broker."""
    return _up(kafka=True).kafka


@pytest.fixture
def topic(kafka: str) -> Callable[..., str]:
    """Creates a topic and returns its name: `topic(partitions=4, name="raw", retention_ms=-1)`."""

    def fresh(partitions: int = 1, name: str = "t", **config: str | int) -> str:
        unique = f"{name}-{uuid.uuid4().hex[:12]}"
        topics.create(kafka, unique, partitions, **config)
        return unique

    return fresh


@pytest.fixture(scope="session")
def redis_url(worker_id: str) -> str:
    """URL of a Redis server, with a database for each worker of a run."""
    worker = int(worker_id.removeprefix("gw")) + 1 if worker_id.startswith("gw") else 0
    return f"{_up(redis=True).redis}/{worker % 16}"


@pytest.fixture(scope="session")
def cassandra_url() -> str:
    """URL of a Cassandra node, without a keyspace: each test that shares it uses its own."""
    return _up(cassandra=True).cassandra

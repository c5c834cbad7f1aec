"""Kafka for the tests of this directory."""

from collections.abc import Iterator

import pytest

from persistence.kafka import KafkaSettings, Topics
from tests.support.runs import Jvm, started_jvm


@pytest.fixture
def settings(kafka: str) -> KafkaSettings:
    return KafkaSettings(kafka)


@pytest.fixture
def topics(settings: KafkaSettings) -> Topics:
    return Topics(settings, timeout=20)


@pytest.fixture(scope="module")
def jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jvm]:
    """A JVM of Spark for runs that come one after the other."""
    with started_jvm(tmp_path_factory.mktemp("jvm") / "log") as jvm:
        yield jvm

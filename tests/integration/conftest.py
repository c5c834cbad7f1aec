"""Kafka for the tests of this directory."""

import pytest

from persistence.kafka import KafkaSettings, Topics


@pytest.fixture
def settings(kafka: str) -> KafkaSettings:
    return KafkaSettings(kafka)


@pytest.fixture
def topics(settings: KafkaSettings) -> Topics:
    return Topics(settings, timeout=20)

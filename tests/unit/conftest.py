"""Commands that unit tests call in their own process start no JVM."""

import pytest


@pytest.fixture(autouse=True)
def no_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggregations.spark.jvm.start_ahead", lambda *_: None)

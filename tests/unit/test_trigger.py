"""The trigger interval: it is waited for only when everything is read."""

import pytest

from tests.unit.test_engine_driver import Driver, flow, report

HOUR = 3600.0


def test_the_rest_of_a_backlog_is_read_at_once_whatever_the_trigger(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, flow(), (report(9), []), (report(3), []))
    batches_before: list[int] = []
    wait = driver.stop.wait

    def noted(seconds: float) -> bool:
        if seconds > HOUR / 2:
            batches_before.append(len(driver.jobs))
            driver.stop.set()
        return wait(min(seconds, 0.01))

    monkeypatch.setattr(driver.stop, "wait", noted)
    driver.engine.stream(until_caught_up=False, trigger_seconds=HOUR, max_records=10)
    assert batches_before == [2]

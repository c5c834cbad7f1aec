"""A start tries again while a server does not answer, and ends at once for anything else."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aggregations.engine import opening
from aggregations.engine.opening import wait_and_open
from aggregations.engine.retry import StoppedError
from aggregations.errors import RunRefusedError
from persistence.errors import Fenced, Transient
from persistence.kafka import BrokerUnavailable
from persistence.kafka.errors import unreachable
from tests.support.driver import flow

AWAY = [Transient("the store does not answer"), BrokerUnavailable("no answer from Kafka", "Check that the broker runs")]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Give the outcome of each attempt to open a run: each shows a plan with its number first."""
    monkeypatch.setattr(opening, "_PAUSE_SECONDS", 0.0)

    def given(*outcomes: Any) -> list[int]:
        made: list[int] = []

        def open_run(_flow: Any, *, planned: Callable[[Any], None], **_given: Any) -> Any:
            made.append(len(made) + 1)
            planned(made[-1])
            outcome = outcomes[made[-1] - 1]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(opening, "open_run", open_run)
        return made

    return given


def test_servers_that_do_not_answer_are_asked_again_and_the_last_plan_is_shown(
    attempts: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    made, shown, prepared = attempts(AWAY[0], AWAY[0], AWAY[1], "open"), list[Any](), list[int]()
    with caplog.at_level(logging.WARNING):
        opened = wait_and_open(
            flow(), stop=threading.Event(), planned=shown.append, meanwhile=lambda: prepared.append(len(made))
        )
    assert opened == "open"
    assert made == [1, 2, 3, 4]
    assert shown == [4]
    assert prepared == [1, 2, 3]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2, "the same error is shown once"
    assert [str(error) in line for error, line in zip(AWAY, told, strict=True)] == [True, True]


@pytest.mark.parametrize(
    "error",
    [
        RunRefusedError("unsafe"),
        Fenced("a newer run"),
        ValueError("a bug"),
        unreachable("no answer", "SSL handshake failed"),
    ],
    ids=repr,
)
def test_what_does_not_pass_ends_the_start_at_once_with_its_plan(
    error: Exception, attempts: Callable[..., list[int]]
) -> None:
    made, shown = attempts(error), list[Any]()
    with pytest.raises(type(error)):
        wait_and_open(flow(), stop=threading.Event(), planned=shown.append)
    assert (made, shown) == ([1], [1])


@pytest.mark.parametrize("error", AWAY, ids=repr)
def test_a_server_that_stays_away_ends_the_start_with_its_error(
    error: Exception, attempts: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "WAIT_SECONDS", -1.0)
    made = attempts(error)
    with pytest.raises(type(error)):
        wait_and_open(flow(), stop=threading.Event())
    assert made == [1]


def test_a_start_that_waits_ends_when_it_is_told_to(
    attempts: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    stop, made, shown = threading.Event(), attempts(*AWAY), list[Any]()
    log = logging.getLogger("headwater.engine")
    handler = logging.Handler()
    handler.emit = lambda _record: stop.set()  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(StoppedError):
            wait_and_open(flow(), stop=stop, planned=shown.append)
    finally:
        log.removeHandler(handler)
    assert (made, shown) == ([1], [])

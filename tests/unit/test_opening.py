"""A start asks again while a server does not answer, and ends at once for anything else."""

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aggregations.engine import opening
from aggregations.engine.opening import _answer, _delivered_from
from aggregations.engine.retry import StoppedError
from aggregations.errors import RunRefusedError
from aggregations.run.plan import PartitionPlan, Plan
from persistence.errors import Fenced, Transient
from persistence.kafka import BrokerUnavailable
from persistence.kafka.errors import unreachable
from persistence.manifest import Manifest

AWAY = [Transient("the store does not answer"), BrokerUnavailable("no answer from Kafka", "Check that the broker runs")]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_PAUSE_SECONDS", 0.0)


def asking(*outcomes: Exception | str) -> tuple[Callable[[], str], list[int]]:
    """A function with these outcomes, one after the other, and the numbers of its calls."""
    calls: list[int] = []

    def ask() -> str:
        outcome = outcomes[len(calls)]
        calls.append(len(calls) + 1)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return ask, calls


def test_servers_that_do_not_answer_are_asked_again_and_each_reason_is_shown_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask, calls = asking(AWAY[0], AWAY[0], AWAY[1], "an answer")
    with caplog.at_level(logging.WARNING):
        assert _answer(ask, threading.Event()) == "an answer"
    assert calls == [1, 2, 3, 4]
    told = [record.getMessage() for record in caplog.records]
    assert [str(error) in line for error, line in zip(AWAY, told, strict=True)] == [True, True]


@pytest.mark.parametrize(
    "error",
    [
        RunRefusedError("unsafe"),
        Fenced("a newer run"),
        ValueError("a bug"),
        unreachable("no answer (SSL handshake failed: certificate)", "SSL handshake failed: certificate"),
    ],
    ids=repr,
)
def test_what_does_not_pass_ends_the_start_at_once(error: Exception) -> None:
    ask, calls = asking(error)
    with pytest.raises(type(error)):
        _answer(ask, threading.Event())
    assert calls == [1]


@pytest.mark.parametrize("error", AWAY, ids=repr)
def test_a_server_that_stays_away_ends_the_start_with_its_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "WAIT_SECONDS", -1.0)
    ask, calls = asking(error)
    with pytest.raises(type(error)):
        _answer(ask, threading.Event())
    assert calls == [1]


def test_a_start_that_waits_ends_when_it_is_told_to() -> None:
    stop = threading.Event()
    ask, calls = asking(*AWAY)
    log, handler = logging.getLogger("headwater.engine"), logging.Handler()
    handler.emit = lambda _record: stop.set()  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(StoppedError):
            _answer(ask, stop)
    finally:
        log.removeHandler(handler)
    assert calls == [1]


def test_what_something_else_reads_goes_on_at_the_position_or_where_the_log_was_cut_below_it() -> None:
    run: Any = SimpleNamespace(manifest=Manifest(1, 1, {}, {"t": "one"}), positions=lambda _: {0: 10, 1: 10})
    cut, deleted, added = (
        PartitionPlan(0, 5, {}, None, 0, 13),
        PartitionPlan(1, 20, {}, None, 20, 30),
        PartitionPlan(2, None, {}, None, 4, 9),
    )
    assert _delivered_from(run, Plan("t", "one", [cut, deleted, added])) == {0: 5, 1: 10, 2: 0}

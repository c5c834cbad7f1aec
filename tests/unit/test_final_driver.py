"""Windows are published by the driver after their batch; a broker or a store that is away for a moment delays it."""

import json
from collections.abc import Sequence

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.engine import batches
from aggregations.engine.retry import ATTEMPTS
from aggregations.per_message.ledger import Changes
from aggregations.per_message.publishing import OutputMessage
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import read_snapshot
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from persistence.kafka import BrokerRefused, BrokerUnavailable
from tests.support.driver import ENDS, Driver, report
from tests.support.pure import fresh_store

NOW_MS = 1_700_000_100_000
FLOW = (
    Flow("fleet")
    .source(Topic("legs", Json({"tail": str, "at": int}), envelope=False, time="at"))
    .aggregate("aircraft", "tail", Fields(n=count()), window=tumbling("5m", retention="0s"))
    .publish_states("final", on="close")
)


class Sent:
    """Messages that the broker took; it fails as often as it is told to."""

    def __init__(self, *failures: Exception) -> None:
        self.messages: list[OutputMessage] = []
        self._failures = list(failures)

    def __call__(self, _kafka: object, outputs: Sequence[OutputMessage], _largest: object) -> None:
        if self._failures:
            raise self._failures.pop(0)
        self.messages += outputs


def driver(monkeypatch: pytest.MonkeyPatch, sent: Sent, *, sends: bool = True) -> Driver:
    """A run with two open windows, whose next batch closes them."""
    url = fresh_store()
    before = MemoryRunner(FLOW, bind(FLOW, {}, url), topic_ids={"legs": "T1"})
    values = [json.dumps({"tail": tail, "at": NOW_MS}).encode() for tail in ("a", "b", "b")]
    before.process([Record("legs", 0, offset, b"k", value, NOW_MS) for offset, value in enumerate(values)])
    before.close()
    times = dict.fromkeys(ENDS, (NOW_MS + 600000) * 1000)
    monkeypatch.setattr(batches, "produce_outputs", sent)
    return Driver(monkeypatch, FLOW, (report(9, changes=Changes(times=times)), []), urls={"aircraft": url}, sends=sends)


@pytest.mark.parametrize("failures", range(3))
def test_windows_are_published_and_then_leave_although_the_broker_is_away_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    sent = Sent(*[BrokerUnavailable("away", "Wait")] * failures)
    made = driver(monkeypatch, sent)
    made.commit()
    assert {one.key: read_snapshot(one.value).state["n"] for one in sent.messages} == {
        b"a@2023-11-14T22:15:00Z": 1,
        b"b@2023-11-14T22:15:00Z": 2,
    }
    assert len(made.jobs) == 1, "the batch is not folded again"
    assert (made.reports[0].outputs, made.reports[0].removed) == (2, {"aircraft": 2})
    assert made.run.manifest is not None
    assert made.run.manifest.published["aircraft"] == NOW_MS // 1_000 + 600


@pytest.mark.parametrize("error", [BrokerRefused("no", "Ask"), BrokerUnavailable("away", "Wait")])
def test_a_broker_that_stays_away_or_refuses_ends_the_run_and_nothing_leaves(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    made = driver(monkeypatch, sent := Sent(*[error] * ATTEMPTS))
    with pytest.raises(type(error)):
        made.commit()
    assert sent.messages == []
    [store] = made.run.stores.values()
    assert len(list(store.scan(made.run.stage_ref(FLOW.stages[0])))) == 2


def test_what_was_acknowledged_is_not_sent_again_when_the_note_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made = driver(monkeypatch, sent := Sent())
    with faults.use(Injector([Fault("ledger", FaultOutcome.ERROR)])):
        made.commit()
    assert len(sent.messages) == 2
    assert made.run.manifest is not None
    assert made.run.manifest.published["aircraft"] == NOW_MS // 1_000 + 600


def test_the_tasks_of_the_next_batch_find_published_windows_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = driver(monkeypatch, Sent())
    assert made.engine.batches._job([], 1, {}, {}).progress.removed == {"aircraft": NOW_MS // 1_000 // 300 * 300}
    made.commit()
    assert made.engine.batches._job([], 1, {}, {}).progress.removed == {"aircraft": NOW_MS // 1_000 + 600}


def test_a_fold_that_sends_nothing_counts_the_windows_and_lets_them_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    made = driver(monkeypatch, sent := Sent(), sends=False)
    made.commit()
    assert sent.messages == []
    assert (made.reports[0].outputs, made.reports[0].removed) == (2, {"aircraft": 2})

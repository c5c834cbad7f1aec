"""States of filters: those of a flow's stage, as `headwater inspect` and `jobs.states` show them, and those of others."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope.filters import EventIdFilter, SequenceFilter, deduplicate_by_key, from_value
from jobs.republish.filtering import OWNER
from jobs.views import states
from persistence import filter_states
from persistence.kept import KeptValues
from tests.support.cli import run as headwater

SECOND = timedelta(seconds=1)


def flow_of(rule: Any) -> Flow[Any]:
    source = Topic("orders", payload=Json({"id": int}), envelope=False)
    return Flow("shop").source(source).deduplicate(rule).aggregate("all", "_topic", Fields(orders=count()))


def ran(rule: Any, tmp_path: Path) -> tuple[Flow[Any], str]:
    """A flow with this filter, and its store, after five records in two partitions."""
    flow, url = flow_of(rule), f"sqlite://{tmp_path}/states.db"
    runner = MemoryRunner(flow, bind(flow, {}, url))
    sent = [(0, 7), (0, 7), (1, 3), (0, 9), (1, 2)]
    runner.process(
        [
            Record("orders", at, n, b"k" + bytes([97 + number]), b'{"id": %d}' % number, n)
            for n, (at, number) in enumerate(sent)
        ]
    )
    runner.close()
    return flow, url


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SequenceFilter(from_value("id")), {"orders:0": {"seen": 9}, "orders:1": {"seen": 3}}),
        (
            deduplicate_by_key(SECOND),
            {
                "orders:0": {"stream_time_ms": 3, "passed": [[0, 0, {"bytes": "kh"}], [3, 3, {"bytes": "kj"}]]},
                "orders:1": {"stream_time_ms": 4, "passed": [[2, 2, {"bytes": "kd"}], [4, 4, {"bytes": "kc"}]]},
            },
        ),
        (
            EventIdFilter(from_value("id"), SECOND, partitions=1),
            {"0/1": {"stream_time_ms": 4, "floor_ms": None, "ids": [[0, 7], [2, 3], [3, 9], [4, 2]]}},
        ),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_filter_s_stage_is_read_like_any_other(
    rule: Any,
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flow, url = ran(rule, tmp_path)
    monkeypatch.setattr("jobs.loading.load_flow", lambda reference: flow)
    command = ["inspect", "shop:flow", "--stage", rule.name, "--store", url]
    assert headwater(monkeypatch, *command, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {one["key"]: one["state"] for one in lines} == expected
    assert headwater(monkeypatch, *command) == 0
    shown = capsys.readouterr().out
    assert all(key in shown for key in expected)
    assert headwater(monkeypatch, *command, "--json", "--key", next(iter(expected))) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_states_of_a_filter_are_a_table_of_texts(tmp_path: Path) -> None:
    flow, url = ran(SequenceFilter(from_value("id")), tmp_path)
    frame = states(flow, stage="sequence", stores=bind(flow, {}, url)).frame().sort("_key")
    column = next(name for name in frame.columns if not name.startswith("_"))
    assert frame.schema[column] == pl.String
    assert [json.loads(one) for one in frame[column]] == [{"seen": 9}, {"seen": 3}]


def test_the_states_of_a_republisher_s_filter_are_read_without_disturbing_it(tmp_path: Path) -> None:
    rule, url = SequenceFilter(from_value("id")), f"sqlite://{tmp_path}/states.db"
    kept = KeptValues(url, f"{OWNER}group", "SequenceFilter", stage="sequence", shared=True)
    [one] = kept.claim([b"orders:0"]).values()
    assert list(filter_states(rule, url, owner=f"{OWNER}group")) == [(b"orders:0", None)]
    one.value = {"seen": 5}
    kept.save({b"orders:0": one})
    assert list(filter_states(rule, url, owner=f"{OWNER}group")) == [(b"orders:0", {"seen": 5})]
    assert list(filter_states(rule, url)) == []
    kept.save({b"orders:0": one})
    kept.close()

"""The examples of stations, of payments and of delays: filled and run as their first lines say, without Spark."""

import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import polars as pl
import pytest

from aggregations import bind, run_local
from aggregations.definition.flow import Flow
from aggregations.engine.options import RunOptions
from jobs.demo.flights import load
from jobs.views import states
from persistence.kafka import KafkaSettings, Topics

pytestmark = pytest.mark.integration

Created: TypeAlias = Callable[[Mapping[str, int]], KafkaSettings]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def created(kafka: str) -> Iterator[Created]:
    """Creates the topics of an example anew: their names are fixed, and other tests expect that they do not exist."""
    broker = KafkaSettings(kafka)
    topics, made = Topics(broker), list[str]()

    def create(names: Mapping[str, int]) -> KafkaSettings:
        topics.delete([name for name in names if name in topics.names()])
        for name, partitions in names.items():
            topics.create(name, partitions)
            made.append(name)
        return broker

    yield create
    topics.delete(made)


def run(flow: Flow[Any], broker: KafkaSettings, tmp_path: Path, **options: Any) -> dict[str, dict[bytes, Any]]:
    """Run a flow to the ends of its topics; return the results of each stage."""
    stores = bind(flow, {}, f"sqlite://{tmp_path}/states.db")
    run_local(flow, RunOptions(kafka=broker, stores=stores, until_caught_up=True, **options))
    return {stage.name: {view.key: view.state for view in states(flow, stage.name, stores)} for stage in flow.stages}


def test_parts_and_results_of_fastening_stations_meet_by_part_and_attempts_are_counted_in_windows(
    created: Created, tmp_path: Path
) -> None:
    import stations

    broker = created({"ready-to-fasten": 4, "fastening-results": 4})
    attempts = stations.fill(broker)
    found = run(stations.flow, broker, tmp_path)
    parts = found["part"].values()
    assert len(parts) == stations.PARTS
    assert all(part["fastened"] == part["screws"] == stations.SCREWS and part["weakest"] >= 11 for part in parts)
    assert sum(part["attempts"] for part in parts) == attempts
    assert {part["station"] for part in parts} == {"left", "right"}
    for stage in ("screw", "visit", "station"):
        assert sum(one["attempts"] for one in found[stage].values()) == attempts
    screws = stations.SCREWS * stations.PARTS
    assert sum(one["attempts"] - one["failed"] for one in found["screw"].values()) == screws
    assert len({key.partition(b"@")[0] for key in found["screw"]}) == screws < len(found["screw"])
    assert all(one["ok"] for one in found["visit"].values())


def test_delays_of_the_flights_of_a_carrier_are_those_of_the_table(
    kafka: str, created: Created, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import delays

    flights = 3_000
    broker = created({"flights.raw": 4, "flights.legs": 4, "flights.dead": 4})
    monkeypatch.setenv("HEADWATER_KAFKA_BOOTSTRAP", kafka)
    monkeypatch.setattr(sys, "argv", ["fill.py", str(flights)])
    runpy.run_path(str(EXAMPLES / "fill.py"))
    found = run(delays.flow, broker, tmp_path, dead_letters="flights.dead")
    late = pl.col("arr_delay")
    table = (
        load(flights)
        .group_by("carrier")
        .agg(
            flights=pl.len(),
            cancelled=pl.col("dep_time").is_null().sum(),
            worst=late.max(),
            spread=late.std(),
            aircraft=pl.col("tailnum").n_unique(),
            kinds=late.is_not_null().sum(),
        )
    )
    assert found["carrier"].keys() == {carrier.encode() for carrier in table["carrier"]}
    for row in table.iter_rows(named=True):
        state = found["carrier"][row["carrier"].encode()]
        assert {name: state[name] for name in ("flights", "cancelled", "worst")} == {
            name: row[name] for name in ("flights", "cancelled", "worst")
        }
        assert state["spread"] == (None if row["kinds"] < 2 else pytest.approx(row["spread"]))
        assert state["aircraft"] == pytest.approx(row["aircraft"], rel=0.1)
        assert sum(state["delays"]["counts"]) == row["kinds"]
        assert len(state["opened_with"]["values"]) == min(row["flights"], 5)
        assert found["records"][row["carrier"].encode()]["worst"] == row["worst"]


def test_payments_keep_the_category_that_their_merchant_had(created: Created, tmp_path: Path) -> None:
    import spending

    broker = created({"payments": 4, "merchants": 2})
    spending.fill(broker, shift=0, count=2_000)
    first = run(spending.flow, broker, tmp_path)["category"]
    assert first.keys() == {*map(str.encode, spending.CATEGORIES), b"unknown"}
    assert sum(one["payments"] for one in first.values()) == 2_000
    spending.fill(broker, shift=1, count=2_000)
    found = run(spending.flow, broker, tmp_path)
    assert sum(one["payments"] for one in found["category"].values()) == 4_000
    assert all(found["category"][key]["payments"] >= one["payments"] for key, one in first.items())
    assert found["merchant"][b"m-0"] == {"category": "books"}

"""The examples of fastening stations and of payments: filled and run as their first lines say, without Spark."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aggregations import bind, run_local
from aggregations.definition.flow import Flow
from jobs.views import states
from persistence.kafka import KafkaSettings, Topics

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def created(broker: KafkaSettings, names: Mapping[str, int]) -> None:
    """Create the topics of an example anew: their names are fixed."""
    topics = Topics(broker)
    topics.delete([name for name in names if name in topics.names()])
    for name, partitions in names.items():
        topics.create(name, partitions)


def run(flow: Flow[Any], broker: KafkaSettings, tmp_path: Path) -> dict[str, dict[bytes, Any]]:
    """Run a flow to the ends of its topics; return the results of each stage."""
    stores = bind(flow, {}, f"sqlite://{tmp_path}/states.db")
    run_local(flow, kafka=broker, stores=stores, until_caught_up=True)
    return {stage.name: {view.key: view.state for view in states(flow, stage.name, stores)} for stage in flow.stages}


def test_parts_and_results_of_fastening_stations_meet_by_part(kafka: str, tmp_path: Path) -> None:
    import fastening

    broker = KafkaSettings(kafka)
    created(broker, {"ready-to-fasten": 4, "fastening-results": 4})
    attempts = fastening.fill(broker)
    found = run(fastening.flow, broker, tmp_path)
    parts = found["part"].values()
    assert len(parts) == fastening.PARTS
    assert all(part["fastened"] == part["screws"] == 4 and part["weakest"] >= 11 for part in parts)
    assert sum(part["attempts"] for part in parts) == attempts
    assert sum(screw["attempts"] - screw["failed"] for screw in found["screw"].values()) == 4 * fastening.PARTS


def test_payments_keep_the_category_that_their_merchant_had(kafka: str, tmp_path: Path) -> None:
    import spending

    broker = KafkaSettings(kafka)
    created(broker, {"payments": 4, "merchants": 2})
    spending.fill(broker, shift=0, count=2_000)
    first = run(spending.flow, broker, tmp_path)["category"]
    assert first.keys() == {*map(str.encode, spending.CATEGORIES), b"unknown"}
    assert sum(one["payments"] for one in first.values()) == 2_000
    spending.fill(broker, shift=1, count=2_000)
    found = run(spending.flow, broker, tmp_path)
    assert sum(one["payments"] for one in found["category"].values()) == 4_000
    assert all(found["category"][key]["payments"] >= one["payments"] for key, one in first.items())
    assert found["merchant"][b"m-0"] == {"category": "books"}

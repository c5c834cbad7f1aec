"""examples/carriers.py: one SQL query, in polars and in Spark."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aggregations import MemoryRunner, Record, bind
from envelope import Envelope, encode
from jobs.demo.leg_pb2 import Leg
from tests.support.spark import python_path

pytestmark = [pytest.mark.spark, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


def fill(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve legs of each of three carriers, the n-th with n late ones; a fourth carrier has few legs."""
    monkeypatch.delitem(sys.modules, "fleet", raising=False)  # another test may have imported a flow of this name
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from fleet import flow

    legs = [
        Leg(event=Leg.EVENT_ARRIVED, tail=f"N{at}", carrier=carrier, arr_delay=60 if at <= late else 1, air_minutes=50)
        for late, carrier in enumerate(["AA", "B6", "UA"])
        for at in range(1, 13)
    ]
    legs.append(Leg(event=Leg.EVENT_ARRIVED, tail="N1", carrier="WN", arr_delay=99, air_minutes=50))
    runner = MemoryRunner(flow, bind(flow, {}, store))
    runner.process(
        Record("flights.legs", 0, at, b"k", encode(Envelope(leg.SerializeToString()))) for at, leg in enumerate(legs)
    )
    runner.close()


@pytest.mark.parametrize("way", [[], ["--spark"]])
def test_polars_and_spark_give_the_same_carriers(
    way: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"lmdb://{tmp_path}/states"
    fill(store, monkeypatch)
    environment = os.environ | {
        "PYTHONPATH": python_path(EXAMPLES, EXAMPLES.parent),
        "PYSPARK_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [sys.executable, EXAMPLES / "carriers.py", store, *way],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("┆")] for line in done.stdout.replace("│", "").splitlines() if "┆" in line
    ]
    assert rows[0] == ["carrier", "legs", "percent_late", "worst"]
    assert [row for row in rows if row[0] in ("AA", "B6", "UA", "WN")] == [
        ["UA", "12", "16.7", "60"],
        ["B6", "12", "8.3", "60"],
        ["AA", "12", "0.0", "1"],
    ]

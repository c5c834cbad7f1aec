"""examples/stations.py: the attempts of a screw are a session, whatever arrives first."""

import json
import runpy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aggregations.definition.element import Record
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from tests.support.pure import fresh_store

EXAMPLE = Path(__file__).parents[2] / "examples" / "stations.py"
SIX = datetime(2026, 11, 24, 6, tzinfo=UTC)


def fastening(offset: int, screw: str, torque: int, second: int) -> Any:
    at = round(SIX.timestamp() + second) * 1000
    value = {"station": "s1", "screw": screw, "torque": torque, "ok": torque >= 60, "at": at}
    return Record("fastenings", 0, offset, b"s1", json.dumps(value).encode(), timestamp_ms=at)


def test_attempts_are_counted_per_screw_until_it_is_done_and_per_station_in_ten_minutes() -> None:
    flow = runpy.run_path(str(EXAMPLE))["flow"]
    runner = MemoryRunner(flow, bind(flow, {}, fresh_store()))
    runner.process([fastening(0, "a", 40, 0), fastening(1, "a", 61, 200), fastening(2, "b", 60, 210)])
    runner.process([fastening(3, "a", 50, 100), fastening(4, "a", 62, 900)])
    assert runner.results("screw") == {
        b"a@2026-11-24T06:00:00Z/2026-11-24T06:03:20Z": {
            "attempts": 3,
            "torque": 61,
            "ok": True,
            "torques": {"values": [40, 61, 50], "dropped": 0},
        },
        b"a@2026-11-24T06:15:00Z/2026-11-24T06:15:00Z": {
            "attempts": 1,
            "torque": 62,
            "ok": True,
            "torques": {"values": [62], "dropped": 0},
        },
        b"b@2026-11-24T06:03:30Z/2026-11-24T06:03:30Z": {
            "attempts": 1,
            "torque": 60,
            "ok": True,
            "torques": {"values": [60], "dropped": 0},
        },
    }
    assert runner.results("station") == {
        b"s1@2026-11-24T06:00:00Z": {"attempts": 4, "failed": 2},
        b"s1@2026-11-24T06:10:00Z": {"attempts": 1, "failed": 0},
    }

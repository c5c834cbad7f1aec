"""examples/stations.py: parts and results meet; the attempts of a screw are in windows, whatever arrives first."""

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


def record(topic: str, offset: int, second: int, **fields: object) -> Any:
    at = round(SIX.timestamp() + second) * 1000
    value = {"part": "p", "station": "s1", "at": at, **fields}
    return Record(topic, 0, offset, b"p", json.dumps(value).encode(), timestamp_ms=at)


def fastening(offset: int, screw: int, torque: float, second: int) -> Any:
    return record("fastening-results", offset, second, screw=screw, torque=torque, ok=torque >= 11)


def test_attempts_are_counted_per_part_per_screw_and_window_per_visit_and_per_station() -> None:
    flow = runpy.run_path(str(EXAMPLE))["flow"]
    runner = MemoryRunner(flow, bind(flow, {}, fresh_store()))
    runner.process([fastening(0, 1, 4.0, 0), fastening(1, 1, 11.5, 200), fastening(2, 2, 12.0, 210)])
    ready = record("ready-to-fasten", 0, -10, screws=2)
    runner.process([fastening(3, 1, 5.0, 100), ready, fastening(4, 1, 12.5, 900)])
    assert runner.results("part") == {
        b"p": {"station": "s1", "screws": 2, "attempts": 5, "fastened": 3, "weakest": 11.5},
    }
    assert runner.results("screw") == {
        b"p/1@2026-11-24T06:00:00Z": {"attempts": 3, "failed": 2, "torque": 11.5},
        b"p/1@2026-11-24T06:15:00Z": {"attempts": 1, "failed": 0, "torque": 12.5},
        b"p/2@2026-11-24T06:00:00Z": {"attempts": 1, "failed": 0, "torque": 12.0},
    }
    assert runner.results("visit") == {
        b"p/1@2026-11-24T06:00:00Z/2026-11-24T06:03:20Z": {
            "attempts": 3,
            "ok": True,
            "torques": {"values": [4.0, 11.5, 5.0], "dropped": 0},
        },
        b"p/1@2026-11-24T06:15:00Z/2026-11-24T06:15:00Z": {
            "attempts": 1,
            "ok": True,
            "torques": {"values": [12.5], "dropped": 0},
        },
        b"p/2@2026-11-24T06:03:30Z/2026-11-24T06:03:30Z": {
            "attempts": 1,
            "ok": True,
            "torques": {"values": [12.0], "dropped": 0},
        },
    }
    assert runner.results("station") == {
        b"s1@2026-11-24T06:00:00Z": {"attempts": 4, "failed": 2},
        b"s1@2026-11-24T06:10:00Z": {"attempts": 1, "failed": 0},
    }

"""`make bench` on a few thousand events: headwater and the peers that start fast, all exact."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow, pytest.mark.kills]

ROOT = Path(__file__).parents[2]


def test_headwater_and_its_peers_are_measured_on_one_topic_and_all_are_exact(tmp_path: Path) -> None:
    left = tmp_path / "temporary"
    left.mkdir()
    size = ["--events", "6000", "--keys", "50", "--rounds", "1", "--resent", "0.2"]
    peers = "headwater,kafka-streams,kafka-streams-sink,python-loop"
    command = [sys.executable, "-m", "benchmarks", "--only", peers, "--stores", "lmdb", *size]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out"), "--json"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(left)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert [(one["system"], one["store"]) for one in told["systems"]] == [
        ("headwater", "lmdb"),
        ("kafka-streams", "rocksdb"),
        ("kafka-streams-sink", "rocksdb"),
        ("python-loop", "redis"),
    ]
    ours, theirs, *_ = told["systems"]
    assert told["ratio_from_start"] == {"50": {"lmdb": round(ours["from_start"] / theirs["from_start"], 2)}}
    assert {"ratio", "ratio_cpu"} <= set(told), "empty if one commit was both the first and the last"
    for one in told["systems"]:
        assert (one["keys"], one["events"], one["verified"]) == (50, 6000, True)
        assert one["off_by"] == {"keys": 0, "events": 0, "missing": 0}
        assert one["from_start"] > 0
        assert one["first_commit_seconds"] <= one["seconds"]
        assert "kafka" in one["cpu_by_part"] or one["events_per_second"] is None
    assert {"driver", "jvm", "workers"} <= set(ours["peak_resident_mb"])
    assert "bench.svg" in {file.name for file in (tmp_path / "out").iterdir()}
    assert not list(left.glob("headwater-*")), "servers and states are removed"

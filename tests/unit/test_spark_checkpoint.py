"""Spark's checkpoint: what is read of it, and who deletes it."""

import signal
import subprocess
import sys
from pathlib import Path

from aggregations.spark.checkpoint import Checkpoint
from aggregations.spark.retry import ATTEMPTS, pause_seconds

KILLED = """
import os, signal, sys
from pathlib import Path
from aggregations.spark.checkpoint import Checkpoint
with Checkpoint(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_ends_of_a_batch_are_those_of_all_partitions(tmp_path: Path) -> None:
    with Checkpoint(tmp_path) as checkpoint:
        log = checkpoint.path / "offsets"
        log.mkdir()
        (log / "3").write_text('v1\n{"batchWatermarkMs":0,"conf":{}}\n{"legs":{"1":0,"0":41}}')
        assert checkpoint.ends(3) == {("legs", 0): 41, ("legs", 1): 0}


def test_it_is_gone_behind_the_query(tmp_path: Path) -> None:
    with Checkpoint(tmp_path) as checkpoint:
        (checkpoint.path / "offsets").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_driver_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    with Checkpoint(tmp_path) as first, Checkpoint(tmp_path) as second:
        assert not left.exists()
        assert first.path.exists()
        assert second.path.exists()


def test_the_attempts_at_a_batch_take_about_a_minute() -> None:
    assert 38 < sum(pause_seconds(attempt) for attempt in range(1, ATTEMPTS)) < 64

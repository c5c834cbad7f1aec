"""A daemon that is started before Spark starts its own: what it takes over, when it does not, and how it ends."""

import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aggregations.spark.daemon_ahead import ADDRESS, DaemonAhead

SPARKS = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "YES", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
THREADS = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
HANDS_OVER = """
import os, sys
from aggregations.spark.daemon_ahead import hand_over
hand_over()
print("itself", "HW_PYTHON_DAEMON" in os.environ)
"""


@pytest.fixture
def ahead() -> Iterator[DaemonAhead]:
    daemon = DaemonAhead({**os.environ, **SPARKS, **THREADS})
    yield daemon
    daemon.end()
    daemon.process.kill()
    daemon.process.wait()


def started(address: Path, program: str = HANDS_OVER, **more: str) -> "subprocess.Popen[bytes]":
    """Spark's daemon."""
    ours = {**os.environ, **SPARKS, **THREADS, ADDRESS: str(address), "SPARK_OF_THE_DAEMON": "1", **more}
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env=ours, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_it_takes_the_place_of_sparks_daemon_and_both_end_when_spark_closes_it(ahead: DaemonAhead) -> None:
    daemon = started(ahead.address)
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    (port,) = struct.unpack("!i", daemon.stdout.read(4))
    assert 0 < port < 1 << 16
    for stream in (0, 1):
        theirs = (os.readlink(f"/proc/{pid}/fd/{stream}") for pid in (ahead.process.pid, daemon.pid))
        assert len(set(theirs)) == 1
    ahead.end()
    assert ahead.process.poll() is None, "it belongs to Spark now"
    daemon.stdin.close()
    ahead.process.wait(30)
    assert daemon.wait(30) == 0
    assert not ahead.address.parent.exists()


def test_sparks_daemon_ends_with_the_one_that_took_its_place(ahead: DaemonAhead) -> None:
    daemon = started(ahead.address)
    assert daemon.stdout is not None
    daemon.stdout.read(4)
    os.kill(ahead.process.pid, signal.SIGKILL)
    assert daemon.wait(30) == 0


@pytest.mark.parametrize("name", ["POLARS_MAX_THREADS", "PYTHONHASHSEED"])
def test_sparks_daemon_with_other_settings_does_the_work_itself(ahead: DaemonAhead, name: str) -> None:
    daemon = started(ahead.address, **{name: "2"})
    said, _ = daemon.communicate(timeout=60)
    assert said.decode().split() == ["itself", "False"]
    assert ahead.process.wait(30) == 0
    again = started(ahead.address)
    said, _ = again.communicate(timeout=60)
    assert said.decode().split() == ["itself", "False"], "there is one only"


def runs(pid: str) -> bool:
    """Whether a process has not ended; it may not have been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_it_ends_with_the_process_that_started_it() -> None:
    program = """
import os, sys
from aggregations.spark.daemon_ahead import DaemonAhead
daemon = DaemonAhead(os.environ)
print(daemon.process.pid, daemon.address.parent)
sys.stdout.flush()
os._exit(0)
"""
    said = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **SPARKS}, stdout=subprocess.PIPE, check=True
    )
    pid, directory = said.stdout.decode().split()
    deadline = time.monotonic() + 60
    while runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not Path(directory).exists()


def test_it_listens_in_a_short_directory_if_that_of_temporary_files_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    daemon = DaemonAhead({**os.environ, **SPARKS})
    daemon.end()
    assert daemon.address.parent.parent == Path("/tmp")


def test_it_is_ended_if_nobody_needs_it(ahead: DaemonAhead) -> None:
    ahead.end()
    assert ahead.process.poll() == -signal.SIGKILL
    assert not ahead.address.parent.exists()


def test_a_process_without_standard_input_can_start_it() -> None:
    program = """
import os, subprocess, sys
from aggregations.spark.daemon_ahead import ADDRESS, DaemonAhead
os.close(0)
daemon = DaemonAhead(os.environ)
command, environment = [sys.executable, "-c", sys.argv[1]], {**os.environ, ADDRESS: str(daemon.address)}
with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sparks:
    print(sparks.stdout.read(4) == b"itse")
daemon.process.wait()
"""
    command = [sys.executable, "-c", program, HANDS_OVER]
    said = subprocess.run(command, env={**os.environ, **SPARKS, **THREADS}, stdout=subprocess.PIPE, check=True)
    assert said.stdout == b"False\n"

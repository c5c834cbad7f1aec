"""Producer sessions and copies in the tests: as processes, and what they have written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from envelope import Envelope, decode
from persistence.kafka import KafkaSettings, Topics
from tests.support.republish import ROOT, read_all

SECONDS = 120
"""Longest that a process may take."""


def ran(module: str, faults: str = "", **arguments: Any) -> tuple[int, list[str]]:
    """Run a process of the tests to its end: its exit code, and the lines that it wrote."""
    env = {**os.environ, "HEADWATER_FAULT": faults, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"tests.integration.{module}", json.dumps(arguments)]
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    return done.returncode, done.stdout.splitlines()


def killed(module: str, faults: str, **arguments: Any) -> list[str]:
    """Run a process that SIGKILL ends: the lines that it wrote."""
    code, lines = ran(module, faults, **arguments)
    assert code == -signal.SIGKILL, (code, lines)
    return lines


def written(settings: KafkaSettings, topic: str) -> list[Envelope]:
    """The envelopes in a topic, by partition and offset, as soon as no transaction is open."""
    topics = Topics(settings, timeout=20)
    # The coordinator acknowledges a commit before its marker is in the partition.
    while {place: marks.high for place, marks in topics.marks([topic]).items()} != topics.ends([topic]):
        time.sleep(0.05)
    records = read_all(settings.with_options(isolation_level="read_committed"), topic)
    return [decode(one.value()) for one in sorted(records, key=lambda one: (one.partition(), one.offset()))]


def lines_file(path: Path, count: int) -> list[bytes]:
    """Write a file of lines of different lengths; return them."""
    lines = [b"%d %s\n" % (number, b"x" * (number % 13)) for number in range(count)]
    path.write_bytes(b"".join(lines))
    return lines

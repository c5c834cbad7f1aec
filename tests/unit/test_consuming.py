"""When messages are read at their addresses, and what happens to them and to the client's log."""

import logging
import subprocess
import sys
from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest

from aggregations.engine import consuming
from persistence.kafka import librdkafka

FILLED = """
from confluent_kafka import Consumer, Producer
import logging, signal, sys
from aggregations.engine import consuming
from persistence.kafka import librdkafka
mock = Consumer({"bootstrap.servers": "x", "group.id": "g", "test.mock.num.brokers": 1, "log_level": 0})
broker = mock.list_topics("t", 10).brokers[1]
servers = f"{broker.host}:{broker.port}"
settings = {"bootstrap.servers": servers, "group.id": "g", "auto.offset.reset": "error", "logger": logging.getLogger()}
pointers = consuming.Pointers(settings, 1)
producer = Producer({"bootstrap.servers": servers, "log_level": 0})
for _ in range(5):
    producer.produce("t", b"v", partition=0)
assert producer.flush(10) == 0
pointers.assign("t", {0: 0})
"""
LEAVES = f"""{FILLED}
assert pointers.take(5, 10)[0].num_rows == 1
assert len(pointers._fetched.waiting) == 4
"""
INTERRUPTED_WHILE_TAKING = f"""{FILLED}
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.5)
try:
    pointers.take(6, 2)  # it waits for the sixth
    sys.exit("not interrupted")
except KeyboardInterrupt:
    assert (pointers._fetched.waiting != 0).sum() == 5
    pointers.close()
"""
INTERRUPTED_WHILE_GIVING_BACK = f"""{LEAVES}
from aggregations.columns import message_kernels
def interrupted(*arguments):
    raise KeyboardInterrupt
give_back, message_kernels.destroyed = message_kernels.destroyed, interrupted
try:
    pointers.take(5, 10)
    sys.exit("not interrupted")
except KeyboardInterrupt:
    message_kernels.destroyed = give_back
    pointers.close()
"""


@pytest.mark.parametrize("name", ["libversion", "version"])
@pytest.mark.parametrize(
    ("version", "can"),
    [
        (("2.12.1-RC1", 0), True),
        ("2.12.0", True),  # as 2.12 of confluent-kafka tells it
        (("2.11.0", 0), False),
        ("2.17.0", False),
        (("3.13.0", 0), False),
        ("2", False),
    ],
)
def test_only_versions_that_were_checked_are_read_by_pointers(
    name: str, version: Any, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confluent_kafka, name, lambda: version)
    assert librdkafka.is_known() == can


def test_the_versions_that_are_locked_were_checked() -> None:
    assert librdkafka.is_known()


def test_log_lines_of_the_client_reach_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = {"bootstrap.servers": "localhost:1", "group.id": "g", "debug": "cgrp"}
    pointers = consuming.Pointers({**settings, "logger": logging.getLogger("headwater.kafka")}, 1)
    pointers.take(1, 0.0)
    pointers.close()
    pointers.close()
    lines = [one for one in caplog.records if "initialized" in one.getMessage()]
    assert [(one.name, one.levelno) for one in lines] == [("headwater.kafka", logging.DEBUG)]
    assert lines[0].getMessage().startswith("INIT [rdkafka#consumer-")


def test_the_name_of_a_header_that_is_not_utf_8_is_replaced() -> None:
    names = pa.array([b"a\xffb", "größe".encode(), b""], pa.binary())
    assert consuming.texts(names).to_pylist() == ["\ufffd", "größe", ""]
    assert consuming.texts(names[1:]).to_pylist() == ["größe", ""]


@pytest.mark.parametrize("program", [LEAVES, INTERRUPTED_WHILE_TAKING, INTERRUPTED_WHILE_GIVING_BACK])
def test_a_process_ends_though_it_left_messages_unread(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

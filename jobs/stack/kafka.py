"""A Kafka broker and its controller in one process (KRaft)."""

import base64
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from struct import iter_unpack
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from jobs.stack import jars, ports
from jobs.stack.java import ANY_PATH, java, server_options
from jobs.stack.server import Launch, OnStep
from jobs.stack.state import StackError

_PROPERTIES: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{client}
controller.listener.names=CONTROLLER
log.dirs={data}

# A misspelt topic is an error.
auto.create.topics.enable=false
# Retention goes by the records' timestamps: it would delete data sets of past years at once.
log.retention.ms=-1

# One node.
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1

# For a laptop: less disk and memory, shorter waits.
offsets.topic.num.partitions=4
transaction.state.log.num.partitions=4
share.coordinator.state.topic.num.partitions=4
group.initial.rebalance.delay.ms=0
num.network.threads=2
num.io.threads=4
log.segment.bytes=268435456
log.index.size.max.bytes=1048576
log.segment.delete.delay.ms=1000
log.cleaner.dedupe.buffer.size=16777216
"""

_LOGGING: Final = """\
status = error
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %c{1}: %m%n%throwable{short}
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
"""


PORTS: Final = ("client", "controller")
"""Names of the broker's ports in `ports.json`."""


def prepare(
    home: Path,
    *,
    heap_mb: int,
    progress: OnStep,
    properties: Mapping[str, str] | None = None,
    format_options: Sequence[str] = (),
) -> Launch:
    """Write the broker's configuration and format its storage on the first start.

    Args:
        home: The broker's directory.
        heap_mb: Java heap, in MiB.
        progress: Called with each step that takes time.
        properties: More broker settings, by Kafka's names; they win over those above.
        format_options: More options for formatting the storage, for example users of SCRAM (`--add-scram`).
    """
    found = jars.kafka_broker(progress=lambda jar: progress(f"downloading {jar}"))
    chosen = ports.remembered(home, PORTS, progress)
    configuration, logging, data = home / "server.properties", home / "log4j2.properties", home / "data"
    # Java uses the last value of a name.
    more = "".join(f"{name}={value}\n" for name, value in (properties or {}).items())
    configuration.write_text(_latin(_PROPERTIES.format(**chosen, data=data) + more), encoding="ascii")
    logging.write_text(_LOGGING)
    run = (
        java(),
        f"-Xmx{heap_mb}m",
        # On a few cores this collector leaves the most CPU time to other processes.
        "-XX:+UseSerialGC",
        "-XX:+ExitOnOutOfMemoryError",
        *server_options(),
        f"-Dlog4j2.configurationFile={logging}",
        "-cp",
        f"{found[0].parent}/*",
    )
    if not (data / "meta.properties").exists():
        _format(
            (*run, "kafka.tools.StorageTool", "format", "-t", _cluster_id(), "-c", str(configuration), *format_options)
        )
    address = f"{ports.LOOPBACK}:{chosen['client']}"
    command = (*run, "kafka.Kafka", str(configuration))
    return Launch(command, address, lambda: _is_ready(chosen["client"], address), ANY_PATH)


def _latin(text: str) -> str:
    """Encode a properties file, which Java reads as Latin-1: other characters become UTF-16 in hexadecimal."""
    return "".join(letter if letter.isascii() else _hexadecimal(letter) for letter in text)


def _hexadecimal(letter: str) -> str:
    return "".join(f"\\u{unit:04x}" for (unit,) in iter_unpack(">H", letter.encode("utf-16-be")))


def _cluster_id() -> str:
    """A random id in Kafka's format: 22 characters that do not begin with a dash."""
    return "h" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]


def _format(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **ANY_PATH}
    )
    if done.returncode != 0:
        said = [
            line for line in (done.stderr or done.stdout).splitlines() if line[:1].strip()
        ]  # without the stack trace
        raise StackError(f"Kafka could not format its storage ({' | '.join(said[-3:]) or 'it gave no reason'})")


def _is_ready(port: int, address: str) -> bool:
    """A broker appears in its own metadata when it can host partitions."""
    if ports.is_free(port):
        return False
    try:
        metadata = AdminClient({"bootstrap.servers": address, "log_level": 0}).list_topics(timeout=5)
    except KafkaException:
        return False
    return bool(metadata.brokers)

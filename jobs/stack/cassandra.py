"""A Cassandra node, started from the jars of cassandra-all."""

from pathlib import Path
from typing import Final

from jobs.stack import jars, ports
from jobs.stack.java import ANY_PATH, java, server_options
from jobs.stack.server import Launch, OnStep

_YAML: Final = """\
cluster_name: headwater
num_tokens: 1
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters:
      - seeds: "127.0.0.1:{storage}"
listen_address: 127.0.0.1
rpc_address: 127.0.0.1
storage_port: {storage}
start_native_transport: true
native_transport_port: {client}
data_file_directories: ["{data}/data"]
commitlog_directory: {data}/commitlog
saved_caches_directory: {data}/saved_caches
hints_directory: {data}/hints
cdc_raw_directory: {data}/cdc_raw
# An acknowledged write is on disk. With the default, periodic, a kill loses the last second.
commitlog_sync: group
commitlog_sync_group_window: 5ms
paxos_variant: v2
auto_snapshot: false
"""

_LOGGING: Final = """\
<configuration>
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%d %level %logger{0}: %msg%n%ex{short}</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""

_EXPORTS: Final = (
    "java.base/jdk.internal.misc java.base/jdk.internal.ref java.base/sun.nio.ch "
    "java.management.rmi/com.sun.jmx.remote.internal.rmi java.rmi/sun.rmi.registry java.rmi/sun.rmi.server "
    "java.sql/java.sql jdk.unsupported/sun.misc"
)
_OPENS: Final = (
    "java.base/java.lang java.base/java.lang.module java.base/java.lang.reflect java.base/java.io java.base/java.math "
    "java.base/java.net java.base/java.nio java.base/java.util java.base/java.util.concurrent "
    "java.base/java.util.concurrent.atomic java.base/sun.nio.ch java.base/jdk.internal.loader "
    "java.base/jdk.internal.ref java.base/jdk.internal.reflect java.base/jdk.internal.math "
    "java.base/jdk.internal.module java.base/jdk.internal.util.jar jdk.management/com.sun.management.internal"
)
"""The Java 17 modules that Cassandra 5 uses internally, from its `jvm17-server.options`."""

_OPTIONS: Final = b"\x04\x00\x00\x00\x05\x00\x00\x00\x00"
"""The native protocol's OPTIONS request, version 4."""
_SUPPORTED: Final = 6


def prepare(home: Path, *, heap_mb: int, progress: OnStep) -> Launch:
    """Write the configuration of a single node that forms its ring at once."""
    found = jars.cassandra(progress=lambda jar: progress(f"downloading {jar}"))
    chosen = ports.remembered(home, ("client", "storage"), progress)
    config, logging, data = home / "cassandra.yaml", home / "logback.xml", home / "data"
    data.mkdir(exist_ok=True)
    config.write_text(_YAML.format(**chosen, data=data), encoding="utf-8")
    logging.write_text(_LOGGING)
    command = (
        java(),
        *("-Xms256m", f"-Xmx{heap_mb}m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC"),
        "-XX:+ExitOnOutOfMemoryError",
        *server_options(),
        *(f"--add-exports={module}=ALL-UNNAMED" for module in _EXPORTS.split()),
        *(f"--add-opens={module}=ALL-UNNAMED" for module in _OPENS.split()),
        "-Djdk.attach.allowAttachSelf=true",
        f"-Dlogback.configurationFile={logging}",
        f"-Dcassandra.config={config.as_uri()}",
        f"-Dcassandra.storagedir={data}",
        "-Dcassandra-foreground=yes",
        # No other node is in the ring.
        "-Dcassandra.skip_wait_for_gossip_to_settle=0",
        "-Dcassandra.ring_delay_ms=1000",
        "-Dcassandra.superuser_setup_delay_ms=0",
        "-Dcassandra.initial_token=0",
        *("-cp", f"{found[0].parent}/*", "org.apache.cassandra.service.CassandraDaemon"),
    )
    port = chosen["client"]
    return Launch(
        command, f"cassandra://{ports.LOOPBACK}:{port}", lambda: _is_ready(port), ANY_PATH, ready_seconds=180.0
    )


def _is_ready(port: int) -> bool:
    """Whether the node accepts requests: it opens the native protocol last."""
    answer = ports.ask(port, _OPTIONS, 9)
    return len(answer) > 4 and answer[4] == _SUPPORTED

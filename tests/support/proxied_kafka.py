"""A broker whose clients connect through a proxy that can break their connections."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.stack import kafka, ports, process
from tests.support.proxy import Proxy

_READY_SECONDS = 120
_CUT = "cut"


@contextmanager
def proxied_kafka() -> Iterator[tuple[str, Proxy]]:
    """Address of a broker without the proxy, and the proxy; stopped and deleted at the end of the `with` block."""
    home = Path(tempfile.mkdtemp(prefix="headwater-proxied-"))
    try:
        chosen = ports.remembered(home, kafka.PORTS)
        (home / _CUT).mkdir()
        cut = ports.remembered(home / _CUT, (_CUT,))[_CUT]
        proxy = Proxy((ports.LOOPBACK, cut))
        plain = f"PLAINTEXT://{ports.LOOPBACK}:{chosen['client']}"
        properties = {
            "listeners": f"{plain},CUT://{ports.LOOPBACK}:{cut},CONTROLLER://{ports.LOOPBACK}:{chosen['controller']}",
            "advertised.listeners": f"{plain},CUT://{ports.LOOPBACK}:{proxy.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CUT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
        launch = kafka.prepare(home, heap_mb=384, progress=lambda _line: None, properties=properties)
        log = home / "kafka.log"
        pid = process.spawn(launch.command, log, home)
        started = process.start_of(pid)
        assert started is not None, log.read_text()
        try:
            deadline = time.monotonic() + _READY_SECONDS
            while not launch.is_ready():
                assert process.start_of(pid) == started and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield launch.address, proxy
        finally:
            proxy.close()
            process.stop(pid, started, launch.stop_seconds)
    finally:
        shutil.rmtree(home, ignore_errors=True)

"""A standalone Spark cluster for one test: a master and a worker as processes, ended by their process ids."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from tests.support.redis_server import free_port
from tests.support.spark import JAVA_OPTIONS

HOME = Path(pyspark.__file__).parent


class Standalone:
    """The address of a master, and its worker."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._processes = directory, list[subprocess.Popen[bytes]]()
        port = free_port()
        self.master = f"spark://127.0.0.1:{port}"
        self._start("master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline or self._processes[0].poll() is not None:
                    raise
                time.sleep(0.1)
        options = ("--host", "127.0.0.1", "--cores", "2", "--memory", "2g", "--webui-port", "0")
        self.worker = self._start("worker.Worker", self.master, *options, "--work-dir", str(directory / "work"))

    def _start(self, name: str, *arguments: str) -> int:
        """Start one of Spark's daemons in the foreground; return its process id."""
        # The machines of a cluster know nothing of this checkout and its virtual environment.
        keep = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "JAVA_HOME", "LANG")}
        env = {**keep, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS}
        log = (self._directory / f"{name}.log").open("wb")
        command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(process)
        return process.pid

    def executors(self) -> list[int]:
        """Process ids of the worker's executors."""
        children = Path(f"/proc/{self.worker}/task").glob("*/children")
        return [int(pid) for one in children for pid in one.read_text().split()]

    def close(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            process.wait()


@contextmanager
def standalone(directory: Path) -> Iterator[Standalone]:
    cluster = Standalone(directory)
    try:
        yield cluster
    finally:
        cluster.close()

"""The servers of the soak: started, killed, frozen, out of disk space, or with a wrong clock."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.stack import cassandra, kafka, ports, process, redis
from jobs.stack.server import Launch
from tests.soak.clock import Clock

_HEAP_MB = 512
_MEGABYTE = 1 << 20
_SIZES = {"kafka": 6144, "redis": 2048, "cassandra": 4096}
"""Maximum megabytes of each server's disk; unused space costs nothing."""
_PREPARE = {"kafka": kafka.prepare, "redis": redis.prepare, "cassandra": cassandra.prepare}


class SoakError(AssertionError):
    """Something did not happen in time; the text names the log to check."""


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition holds.

    Raises:
        SoakError: It did not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SoakError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.05)


class Disk:
    """A separate file system that can be filled: a tmpfs, or, if none can be mounted, a limit of file sizes.

    Attributes:
        kind: `tmpfs` or `RLIMIT_FSIZE`.
    """

    def __init__(self, directory: Path, megabytes: int) -> None:
        self._directory, self._megabytes = directory, megabytes
        directory.mkdir(parents=True, exist_ok=True)
        mounted = os.path.ismount(directory) or self._mount(f"size={megabytes}m")
        self.kind = "tmpfs" if mounted else "RLIMIT_FSIZE"

    def fill(self, pid: int) -> None:
        """Make it full."""
        if self.kind == "tmpfs":
            used = shutil.disk_usage(self._directory).used
            self._mount(f"remount,size={used + 4096}")
        else:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_MEGABYTE, resource.RLIM_INFINITY))

    def free(self, pid: int) -> None:
        """Make room again."""
        if self.kind == "tmpfs":
            self._mount(f"remount,size={self._megabytes}m")
        elif Path(f"/proc/{pid}").exists():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._directory)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def forget(root: Path) -> None:
    """Remove the directory of stopped servers, with their disks."""
    for directory in root.glob("*/data"):
        if os.path.ismount(directory):
            subprocess.run(["umount", str(directory)], check=True)
    shutil.rmtree(root)


class Server:
    """One server with its data directory; it keeps its port.

    Args:
        name: `kafka`, `redis` or `cassandra`.
        root: Directory of all servers.
        own_disk: Whether its disk will be filled.
        options: More arguments of its `prepare`.

    Attributes:
        address: Its address.
        disk: The disk of its data; None if it is not filled.
    """

    def __init__(self, name: str, root: Path, *, own_disk: bool, **options: Mapping[str, str]) -> None:
        self.name = name
        self._home = root / name
        self._home.mkdir(parents=True, exist_ok=True)
        self._process = self._home / "process.json"
        if self._process.exists():  # from a soak that was killed; two servers would damage the directory
            pid, started = json.loads(self._process.read_text())
            process.stop(pid, started, 1.0)
        self.disk = Disk(self._home / "data", _SIZES[name]) if own_disk else None
        self._launch: Launch = _PREPARE[name](self._home, heap_mb=_HEAP_MB, progress=lambda _line: None, **options)
        self.address = self._launch.address
        self._clock = Clock(self._home / "clock")
        self._pid, self._started = 0, ""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port."""
        return ports.LOOPBACK, int(self.address.rpartition(":")[2])

    @property
    def pid(self) -> int:
        """Its process."""
        return self._pid

    @property
    def alive(self) -> bool:
        """Whether its process exists, frozen or not."""
        return process.start_of(self._pid) == self._started if self._pid else False

    def start(self, *, wrong_clock: bool = False) -> None:
        """Start it and wait until it is ready."""
        self._clock.set(0)
        environment = {**self._launch.environment, **(self._clock.environment if wrong_clock else {})}
        log = self._home / f"{self.name}.log"
        for _ in range(3):  # connections of its killed predecessor may still occupy a broker's port
            self._pid = process.spawn(self._launch.command, log, self._home, environment)
            self._started = process.start_of(self._pid) or ""
            self._process.write_text(json.dumps([self._pid, self._started]))
            until(
                lambda: not self.alive or self._launch.is_ready(), self._launch.ready_seconds, f"{self.name}, see {log}"
            )
            if self.alive:
                return
        raise SoakError(f"{self.name} does not start, see {log}")

    @property
    def is_ready(self) -> bool:
        """Whether it is ready."""
        return self.alive and self._launch.is_ready()

    def set_clock(self, hours: int) -> None:
        """Set the offset, in hours, of a process that was started with a wrong clock."""
        self._clock.set(hours)

    def kill(self) -> None:
        """SIGKILL; return when it is gone."""
        self.signal(signal.SIGKILL)
        until(lambda: not self.alive, 30, f"the end of {self.name}")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self._pid, number)

    def stop(self) -> None:
        """End it; its data stays."""
        if self.alive:
            self.signal(signal.SIGCONT)
            process.stop(self._pid, self._started, self._launch.stop_seconds)

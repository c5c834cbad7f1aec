"""The servers of the soak: started, killed, frozen, filled up, and told a wrong time."""

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
"""Megabytes that each server's disk may take; what is not used costs nothing."""
_PREPARE = {"kafka": kafka.prepare, "redis": redis.prepare, "cassandra": cassandra.prepare}


class SoakError(AssertionError):
    """Something did not happen that had to; the text says where to look."""


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for something that processes do in their own time.

    Raises:
        SoakError: It did not happen.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SoakError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.05)


class Disk:
    """A file system of its own that can be made full: a tmpfs, or where none may be mounted a limit of file sizes.

    Attributes:
        kind: `tmpfs` or `RLIMIT_FSIZE`.
    """

    def __init__(self, directory: Path, megabytes: int) -> None:
        self._directory, self._megabytes = directory, megabytes
        directory.mkdir(parents=True, exist_ok=True)
        mounted = os.path.ismount(directory) or self._mount(f"size={megabytes}m")
        self.kind = "tmpfs" if mounted else "RLIMIT_FSIZE"

    def fill(self, pid: int) -> None:
        """From now on nothing more fits on it."""
        if self.kind == "tmpfs":
            used = shutil.disk_usage(self._directory).used
            self._mount(f"remount,size={used + 4096}")
        else:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_MEGABYTE, resource.RLIM_INFINITY))

    def free(self, pid: int) -> None:
        """There is room again."""
        if self.kind == "tmpfs":
            self._mount(f"remount,size={self._megabytes}m")
        elif Path(f"/proc/{pid}").exists():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def _mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._directory)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def forget(root: Path) -> None:
    """Remove the directory of servers that do not run, with their disks."""
    for directory in root.glob("*/data"):
        if os.path.ismount(directory):
            subprocess.run(["umount", str(directory)], check=True)
    shutil.rmtree(root)


class Server:
    """One server with its data directory; it keeps its port.

    Args:
        name: `kafka`, `redis` or `cassandra`.
        root: Directory of all servers.
        own_disk: Its disk is to be filled.
        options: More arguments of its `prepare`.

    Attributes:
        address: Where it serves.
        disk: What its data is on; None when it is not to be filled.
    """

    def __init__(self, name: str, root: Path, *, own_disk: bool, **options: Mapping[str, str]) -> None:
        self.name = name
        self._home = root / name
        self._home.mkdir(parents=True, exist_ok=True)
        self._process = self._home / "process.json"
        if self._process.exists():  # of a soak that was killed; two servers of one directory would ruin it
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
        """Whether its process is there, frozen or not."""
        return process.start_of(self._pid) == self._started if self._pid else False

    def start(self, *, wrong_clock: bool = False) -> None:
        """Start it and wait until it serves."""
        self._clock.set(0)
        environment = {**self._launch.environment, **(self._clock.environment if wrong_clock else {})}
        log = self._home / f"{self.name}.log"
        for _ in range(3):  # a broker may find its port taken by what its killed predecessor left behind
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
        """Whether it serves."""
        return self.alive and self._launch.is_ready()

    def set_clock(self, hours: int) -> None:
        """Let a process that was started with a wrong clock be off by so many hours."""
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

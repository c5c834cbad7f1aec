"""Python that is started before Spark needs it: what is forked from it, when it is not, and how all of it ends."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aggregations.spark.python_ahead import DAEMON, PythonAhead

SPARKS = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "YES", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
THREADS = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
SAYS = """
import json, os, sys
if __name__ == "__main__":
    print(json.dumps([sys.argv[1:], os.environ["OF_SPARK"], os.getcwd(), sys.path[0], os.getppid(), "pyarrow" in sys.modules]))
    print("heard", sys.stdin.read(), file=sys.stderr)
    sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.fixture
def ahead() -> Iterator[PythonAhead]:
    its = PythonAhead({**os.environ, **SPARKS, **THREADS})
    yield its
    its.end()


def started(executable: str, *arguments: str, cwd: Path | None = None, **more: str) -> "subprocess.Popen[bytes]":
    """A process that Spark starts."""
    ours = {**os.environ, **SPARKS, **THREADS, "OF_SPARK": "1", **more}
    pipe = subprocess.PIPE
    return subprocess.Popen([executable, *arguments], env=ours, cwd=cwd, stdin=pipe, stdout=pipe, stderr=pipe)


def grandparent(pid: int) -> int:
    for _ in range(2):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except FileNotFoundError:  # it has just ended
            return 0
    return pid


def runs(pid: int) -> bool:
    """Whether a process has not ended; it may not have been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("code", [0, 3])
def test_a_module_runs_in_a_fork_as_python_would_run_it(ahead: PythonAhead, tmp_path: Path, code: int) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    process = started(ahead.executable, "-m", "says", "one", "two", cwd=tmp_path, CODE=str(code))
    said, complained = process.communicate(b"this", timeout=60)
    assert process.returncode == code
    arguments, *about, server, imported = json.loads(said)
    assert arguments == ["one", "two"]
    assert about == ["1", str(tmp_path), str(tmp_path)]
    assert (server, imported) == (ahead.process.pid, True)
    assert complained == b"heard this\n"


@pytest.mark.parametrize(("name", "value"), [("POLARS_MAX_THREADS", "2"), ("PYTHONHASHSEED", "7"), ("PYTHONUTF8", "0")])
def test_what_was_imported_with_other_settings_is_not_forked(
    ahead: PythonAhead, tmp_path: Path, name: str, value: str
) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    process = started(ahead.executable, "-m", "says", cwd=tmp_path, **{name: value})
    said, complained = process.communicate(b"this", timeout=60)
    *_, parent, imported = json.loads(said)
    assert (process.returncode, parent, imported, complained) == (0, os.getpid(), False, b"heard this\n")


def test_without_a_module_or_a_server_it_is_python_itself(ahead: PythonAhead, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    program = "import sys, numpy; print(sys.executable, 'pyarrow' in sys.modules)"
    said, _ = started(ahead.executable, "-c", program).communicate(timeout=60)
    assert said.decode().split() == [sys.executable, "False"]
    ahead.process.kill()
    ahead.process.wait()
    said, _ = started(ahead.executable, "-m", "says", cwd=tmp_path).communicate(b"", timeout=60)
    *_, parent, imported = json.loads(said)
    assert (parent, imported) == (os.getpid(), False)


def test_the_daemon_of_workers_comes_from_a_server_of_its_own_and_ends_when_spark_closes_it(ahead: PythonAhead) -> None:
    daemon = started(ahead.executable, "-m", DAEMON, "pyspark.worker")
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    (port,) = struct.unpack("!i", daemon.stdout.read(4))
    assert 0 < port < 1 << 16
    (fork,) = (
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if same_output(path, daemon.pid) and grandparent(int(path.name)) == ahead.process.pid
    )
    ahead.end()
    assert runs(fork), "it belongs to Spark"
    daemon.stdin.close()
    eventually(lambda: not runs(fork))
    assert daemon.wait(30) in {0, 1}, "its server, which would have told the code, has ended"


def same_output(path: Path, pid: int) -> bool:
    try:
        return os.readlink(path / "fd" / "1") == os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return False


def test_a_fork_ends_with_its_launcher(ahead: PythonAhead, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    launcher = started(ahead.executable, "-m", "waits", cwd=tmp_path)
    assert launcher.stdout is not None
    fork = int(launcher.stdout.readline())
    launcher.terminate()
    launcher.wait()
    eventually(lambda: not runs(fork))


def test_a_fork_that_is_killed_ends_its_launcher(ahead: PythonAhead, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    launcher = started(ahead.executable, "-m", "waits", cwd=tmp_path)
    assert launcher.stdout is not None
    os.kill(int(launcher.stdout.readline()), signal.SIGKILL)
    assert launcher.wait(60) == 128 + signal.SIGKILL


def test_a_message_for_an_exit_code_is_written(ahead: PythonAhead, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit('no, thanks')\n")
    process = started(ahead.executable, "-m", "ends", cwd=tmp_path)
    _, complained = process.communicate(timeout=60)
    assert (process.returncode, complained) == (1, b"no, thanks\n")


def test_a_fork_has_the_time_zone_and_the_limits_of_its_launcher(ahead: PythonAhead, tmp_path: Path) -> None:
    program = "import resource, time\nprint(time.localtime(0).tm_hour, resource.getrlimit(resource.RLIMIT_NOFILE)[0], end='')\n"
    (tmp_path / "tells.py").write_text(program)
    command = f"ulimit -n 99; exec {ahead.executable} -m tells"
    said, _ = started("/bin/sh", "-c", command, cwd=tmp_path, TZ="Asia/Tokyo").communicate(timeout=60)
    assert said == b"9 99"


def test_other_modules_in_front_are_not_forked(ahead: PythonAhead, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), SPARKS["PYTHONPATH"]])}
    said, _ = started(ahead.executable, "-m", "says", cwd=tmp_path, **path).communicate(b"", timeout=60)
    assert json.loads(said)[-1] is False


def test_launchers_that_do_not_go_on_harm_nobody(ahead: PythonAhead, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    address = str(Path(ahead.executable).with_name("any"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ends, socket.socket(socket.AF_UNIX) as waits:
        waits.connect(address)
        ends.connect(address)
        ends.close()
        said, _ = started(ahead.executable, "-m", "says", cwd=tmp_path).communicate(b"", timeout=60)
    assert json.loads(said)[-2:] == [ahead.process.pid, True]


def test_without_a_directory_to_be_in_it_is_python_itself(ahead: PythonAhead, tmp_path: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; exec {ahead.executable} -m this"
    said, _ = started("/bin/sh", "-c", command, cwd=tmp_path).communicate(timeout=60)
    assert said.startswith(b"The Zen of Python")


def test_it_works_beside_a_thousand_open_files(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    program = """
import os, resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
from aggregations.spark.python_ahead import PythonAhead
ahead = PythonAhead(os.environ)
said = subprocess.run([ahead.executable, "-m", "says"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout
print(str(ahead.process.pid) in said.decode())
ahead.end()
"""
    environment = {**os.environ, **SPARKS, **THREADS, "OF_SPARK": "1"}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    assert said.stdout == b"True\n"


def test_it_ends_with_the_process_that_started_it() -> None:
    program = """
import os, sys
from aggregations.spark.python_ahead import PythonAhead
ahead = PythonAhead(os.environ)
print(ahead.process.pid, ahead.executable)
sys.stdout.flush()
os._exit(0)
"""
    said = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **SPARKS}, stdout=subprocess.PIPE, check=True
    )
    pid, executable = said.stdout.decode().split()
    eventually(lambda: not runs(int(pid)))
    assert not Path(executable).parent.exists()


def test_it_listens_in_a_short_directory_if_that_of_temporary_files_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    its = PythonAhead({**os.environ, **SPARKS})
    its.end()
    assert Path(its.executable).parent.parent == Path("/tmp")


def test_it_is_ended(ahead: PythonAhead) -> None:
    ahead.end()
    assert ahead.process.poll() == -signal.SIGKILL
    assert not Path(ahead.executable).parent.exists()


def test_a_process_without_standard_streams_can_start_it(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    program = """
import os, subprocess, sys
from aggregations.spark.python_ahead import PythonAhead
os.close(0)
ahead = PythonAhead(os.environ)
with subprocess.Popen([ahead.executable, "-m", "says"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as sparks:
    print(str(ahead.process.pid) in sparks.stdout.read().decode())
ahead.end()
"""
    environment = {**os.environ, **SPARKS, **THREADS, "OF_SPARK": "1"}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, check=True
    )
    assert said.stdout == b"True\n"

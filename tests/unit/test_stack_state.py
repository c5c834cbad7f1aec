import errno
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import stack
from jobs.stack import kafka, lifecycle, ports, process, redis
from jobs.stack.server import Launch
from jobs.stack.state import ServerState, StackError, StackState

SLEEPER = (sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()",
)

SYS_EXIT = {"x86_64": 60, "aarch64": 93}
"""Number of the system call that ends one thread."""
FIRST_THREAD_ENDS = (
    sys.executable,
    "-c",
    (
        "import ctypes, os, platform, signal, threading\n"
        "def last():\n"
        "    leader = f'/proc/{os.getpid()}/stat'\n"
        "    while open(leader).read().rpartition(')')[2].split()[0] != 'Z': pass\n"
        "    print('up', flush=True)\n"
        "    signal.pause()\n"
        "threading.Thread(target=last).start()\n"
        f"ctypes.CDLL(None).syscall({SYS_EXIT.get(platform.machine())}, 0)"
    ),
)


def started(tmp_path: Path, command: tuple[str, ...], name: str = "kafka") -> ServerState:
    log = tmp_path / f"{name}.log"
    pid = process.spawn(command, log, tmp_path)
    while not log.read_bytes():
        time.sleep(0.01)
    return ServerState(name, pid, process.start_of(pid) or "", "127.0.0.1:1", str(log))


def test_a_spawned_process_is_alive_until_it_is_stopped(tmp_path: Path) -> None:
    server = started(tmp_path, SLEEPER)
    assert server.alive
    assert process.stop(server.pid, server.started, 10)
    assert not server.alive


def test_a_spawned_process_has_a_session_of_its_own_so_that_no_terminal_interrupts_it(tmp_path: Path) -> None:
    server = started(tmp_path, SLEEPER)
    assert os.getsid(server.pid) == server.pid
    process.stop(server.pid, server.started, 10)


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists() or platform.machine() not in SYS_EXIT,
    reason="needs Linux's /proc, and the number of exit",
)
def test_a_process_is_alive_as_long_as_one_of_its_threads_is(tmp_path: Path) -> None:
    """A killed JVM holds its ports until the last of its threads has ended."""
    server = started(tmp_path, FIRST_THREAD_ENDS)
    assert server.alive
    process.stop(server.pid, server.started, 0.1)
    assert not server.alive


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    server = started(tmp_path, STUBBORN)
    assert not process.stop(server.pid, server.started, 0.1)
    assert not server.alive


def test_a_pid_that_was_reused_is_neither_taken_for_the_server_nor_signalled(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        server = ServerState("kafka", stranger.pid, "another time", "127.0.0.1:1", "")
        assert not server.alive
        assert process.stop(server.pid, server.started, 0.1)
        assert stranger.poll() is None
        stranger.communicate(b"\n")


def test_a_process_that_died_of_a_signal_is_not_alive_although_nobody_collected_it(tmp_path: Path) -> None:
    server = started(tmp_path, SLEEPER)
    os.kill(server.pid, signal.SIGKILL)
    while server.alive:
        time.sleep(0.01)
    assert process.stop(server.pid, server.started, 0.1)


def test_the_state_is_read_back_with_the_living_servers_only(tmp_path: Path) -> None:
    server = started(tmp_path, SLEEPER)
    dead = ServerState("redis", server.pid, "another time", "redis://127.0.0.1:2", "")
    StackState(tmp_path).having(server).having(dead).save()
    assert StackState.load(tmp_path) == StackState(tmp_path, (server,))
    assert stack.status(tmp_path) == StackState(tmp_path, (server,))
    assert stack.down(tmp_path) == ["kafka"]
    assert stack.status(tmp_path) is None
    assert not server.alive


@pytest.mark.parametrize("content", ["", "{", "[]", '{"servers": [{"name": "kafka"}]}'])
def test_a_damaged_state_file_is_not_taken_for_a_stack_without_servers(tmp_path: Path, content: str) -> None:
    (tmp_path / "stack.json").write_text(content)
    for command in (stack.status, stack.down, stack.up):
        with pytest.raises(StackError, match=rf"stack\.json is damaged.*pgrep -af {tmp_path}.*delete the file"):
            command(tmp_path)


def test_the_command_that_shows_the_servers_of_a_damaged_stack_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    root = tmp_path / "my stack"
    root.mkdir()
    (root / "stack.json").write_text("{")
    with pytest.raises(StackError, match=f"pgrep -af '{root}'"):
        stack.status(root)


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("Unrecognized option\nError: no machine\nError: will exit\n", "Unrecognized option | Error: no machine"),
        ("a\nb\nc\nERROR d\ne\n", "ERROR d (log:"),
        ("a\nb\nc\nd\n", "b | c | d (log:"),
        ("", "it wrote nothing"),
    ],
)
def test_a_server_that_does_not_start_is_quoted(log: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "kafka.log").write_text(log)
    assert lifecycle._said(ServerState("kafka", 1, "", "", str(tmp_path / "kafka.log"))).startswith(said)


def test_a_truncated_state_file_leads_to_the_servers_that_it_still_names(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(f'{{"servers": [{{"name": "kafka", "pid": {os.getpid()}, "sta')
    with pytest.raises(StackError, match=rf"processes {os.getpid()} may be its servers\. End them \(kill PID\)"):
        stack.status(tmp_path)


def test_a_properties_file_has_a_path_of_any_characters_as_java_reads_it() -> None:
    assert kafka._latin("log.dirs=/home/jörg/\U0001f4c1 a\n") == "log.dirs=/home/j\\u00f6rg/\\ud83d\\udcc1 a\n"


def test_the_address_of_a_server_that_does_not_run_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"no kafka runs in .*headwater stack up"):
        _ = StackState(tmp_path).kafka


def test_stopping_a_stack_that_never_was_stops_nothing_and_creates_nothing(tmp_path: Path) -> None:
    assert stack.down(tmp_path / "none") == []
    assert stack.status(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()


def test_ports_are_remembered_while_they_are_free_and_chosen_anew_when_taken(tmp_path: Path) -> None:
    first = ports.remembered(tmp_path, ("client", "controller"))
    assert len(set(first.values())) == 2
    assert ports.remembered(tmp_path, ("client", "controller")) == first
    with ports.socket.socket() as other:
        other.bind((ports.LOOPBACK, first["client"]))
        other.listen()
        second = ports.remembered(tmp_path, ("client", "controller"))
    assert second["client"] != first["client"]
    assert second["controller"] == first["controller"]


def test_a_torn_ports_file_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text('{"client": ')
    assert ports.remembered(tmp_path, ("client",))["client"] in range(20_000, 32_000)


def test_a_taken_port_is_reported_with_its_holder_and_the_new_one(tmp_path: Path) -> None:
    said: list[str] = []
    first = ports.remembered(tmp_path, ("client",), said.append)["client"]
    assert (said, ports.conflicts(tmp_path)) == ([], "")
    with ports.socket.socket() as other:
        other.bind((ports.LOOPBACK, first))
        other.listen()
        who = f"port {first} is taken by process {os.getpid()} \\("
        assert re.match(rf"; {who}.*\): `headwater stack up` chooses another port", ports.conflicts(tmp_path))
        second = ports.remembered(tmp_path, ("client",), said.append)["client"]
    assert re.match(rf"{who}.*\): using {second}; ", said[0])


def test_a_descriptor_that_is_closed_meanwhile_does_not_hide_the_holder_of_a_port() -> None:
    lower = os.open(os.devnull, os.O_RDONLY)
    with ports.socket.socket() as other:
        other.bind((ports.LOOPBACK, 0))
        other.listen()
        os.close(
            lower
        )  # the directory of descriptors is read through this one, which is closed when they are looked at
        assert other.fileno() > lower
        assert ports.holder(other.getsockname()[1]).startswith(f"process {os.getpid()} (")


def test_a_server_that_loses_its_port_while_it_starts_says_who_has_it(tmp_path: Path) -> None:
    home = tmp_path / "redis"
    home.mkdir()
    port = ports.remembered(home, ("client",))["client"]
    server = ServerState("redis", 1, "ended", f"redis://{ports.LOOPBACK}:{port}", str(home / "redis.log"))
    with ports.socket.socket() as other:
        other.bind((ports.LOOPBACK, port))
        other.listen()
        for is_ready in (True, False):
            with pytest.raises(StackError, match=rf"redis.* ended.*port {port} is taken by process {os.getpid()} "):
                lifecycle._wait(server, Launch((), server.address, lambda ready=is_ready: ready))  # type: ignore[misc]


@pytest.mark.parametrize("command", [stack.up, stack.down, stack.status])
def test_a_directory_that_cannot_be_used_is_named_with_the_remedy(
    command: Callable[[Path], object], tmp_path: Path
) -> None:
    root = tmp_path / "stack"
    root.mkdir()
    for name in ("lock", "stack.json"):
        (root / name).mkdir()  # no right to open it, for whatever user
    with pytest.raises(StackError, match=rf"directory {root} cannot be used: Is a directory .*choose another.*--root"):
        command(root)


def test_a_full_disk_leaves_no_draft_and_the_servers_that_were_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started(tmp_path, SLEEPER)
    StackState(tmp_path).having(server).save()

    def fills(path: Path, text: str) -> None:
        with path.open("w"), open("/dev/full", "w") as full:
            full.write(text)

    monkeypatch.setattr(Path, "write_text", fills)
    with pytest.raises(OSError, match="No space left on device"):
        StackState.load(tmp_path).having(server).save()
    assert not list(tmp_path.glob(".stack.json*"))
    assert stack.down(tmp_path) == ["kafka"]
    assert not (tmp_path / "stack.json").exists()


def test_a_server_of_another_user_is_not_reported_as_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = started(tmp_path, SLEEPER)
    StackState(tmp_path).having(server).save()

    def denied(_pid: int, _number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as other:
        other.setattr(process.os, "kill", denied)
        with pytest.raises(StackError, match=rf"kafka \(pid {server.pid}\) runs as another user"):
            stack.down(tmp_path)
    assert stack.down(tmp_path) == ["kafka"]


def test_the_redis_server_gets_an_allocator_for_scripts_and_the_user_has_the_last_word(tmp_path, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    launch = redis.prepare(tmp_path, heap_mb=1, progress=lambda line: None)
    assert launch.environment == {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=16384"}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    launch = redis.prepare(tmp_path, heap_mb=1, progress=lambda line: None)
    assert launch.environment["GLIBC_TUNABLES"].endswith(":glibc.malloc.tcache_count=7")

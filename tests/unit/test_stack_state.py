import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import stack
from jobs.stack import kafka, ports, process
from jobs.stack.state import ServerState, StackError, StackState

SLEEPER = (sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()",
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

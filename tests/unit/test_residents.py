"""Resident processes of an executor: a process of its own plays Spark's daemon, its forks play workers."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

_DAEMON = """
    import json, os, select, sys, time
    from contextlib import suppress
    from multiprocessing import get_context
    from aggregations.spark import residents

    residents.supervise()

    def until_ended(pid):
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [])

    def in_a_worker(work):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            try:
                result = work()
            except Exception as error:
                result = [type(error).__name__, str(error)]
            os.write(theirs, json.dumps(result).encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            return json.loads(pipe.read())
"""


def in_a_daemon(body: str, *arguments: str, cwd: Path | None = None) -> Any:
    """Run the body where `residents.supervise` was called; it prints JSON."""
    script = textwrap.dedent(_DAEMON) + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True, timeout=60, cwd=cwd
    )
    return json.loads(done.stdout)


def test_a_slot_has_one_process_whichever_worker_calls_and_every_slot_its_own() -> None:
    found = in_a_daemon("""
        call = lambda slot: in_a_worker(lambda: residents.call(slot, os.getpid))
        print(json.dumps([call(0), call(1), call(0), call(1), os.getpid()]))
    """)
    assert found[:2] == found[2:4]
    assert len(set(found)) == 3


def test_a_resident_that_dies_is_said_and_the_next_call_has_another_one() -> None:
    pid, lost, other = in_a_daemon("""
        def die():
            return residents.call(0, os._exit, 1)
        print(json.dumps([
            in_a_worker(lambda: residents.call(0, os.getpid)),
            in_a_worker(die),
            in_a_worker(lambda: residents.call(0, os.getpid)),
        ]))
    """)
    assert lost == ["ResidentLostError", "the resident process of slot 0 ended (EOFError)"]
    assert other != pid


def test_a_resident_that_is_idle_ends_and_the_next_call_has_another_one() -> None:
    found = in_a_daemon("""
        residents.IDLE_SECONDS = 0.0
        residents.supervise()
        pids = [in_a_worker(lambda: residents.call(0, os.getpid))]
        until_ended(pids[0])
        pids.append(in_a_worker(lambda: residents.call(0, os.getpid)))
        print(json.dumps([*pids, in_a_worker(lambda: residents.call(1, len, "four"))]))
    """)
    assert found[0] != found[1]
    assert found[2] == 4


def test_a_resident_ends_with_the_worker_that_waits_for_it_whatever_it_does() -> None:
    """Spark ends the worker of a task that it cancels, and the work of the task has to end with it."""
    pid, after = in_a_daemon("""
        import re, signal
        pid = in_a_worker(lambda: residents.call(0, os.getpid))
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as Spark's daemon does: an ended worker is gone
        worker = os.fork()
        if worker == 0:
            residents.call(0, re.match, "(a+)+$", "a" * 60 + "b")  # keeps the GIL for years
        while int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[11]) < 20:
            time.sleep(0.05)
        os.kill(worker, signal.SIGKILL)
        print(json.dumps([pid, in_a_worker(lambda: residents.call(0, os.getpid))]))
    """)
    assert after != pid


def test_a_resident_that_keeps_something_is_not_idle(tmp_path: Path) -> None:
    first, same, other = in_a_daemon(
        """
        residents.IDLE_SECONDS = 0.0
        residents.keepers.append(lambda: os.path.exists(sys.argv[1]))
        residents.supervise()
        pids = [in_a_worker(lambda: residents.call(0, os.getpid))]
        time.sleep(2.5)
        pids.append(in_a_worker(lambda: residents.call(0, os.getpid)))
        os.rmdir(sys.argv[1])
        until_ended(pids[0])
        pids.append(in_a_worker(lambda: residents.call(0, os.getpid)))
        print(json.dumps(pids))
    """,
        str(tmp_path),
    )
    assert first == same != other


def test_without_its_supervisor_a_worker_ends_the_daemon_so_that_spark_starts_both_again() -> None:
    ended, said, code = in_a_daemon("""
        import signal
        terminated = []
        signal.signal(signal.SIGTERM, lambda *_: terminated.append(1))
        pid = in_a_worker(lambda: residents.call(0, os.getpid))
        supervisor = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        os.kill(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)
        kind, text = in_a_worker(lambda: residents.call(0, os.getpid))

        orphan = os.fork()
        if orphan == 0:
            os.getppid = lambda: 1
            residents.call(0, os.getpid)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(orphan, 0)[1])
        print(json.dumps([len(terminated), kind, code]))
    """)
    assert (ended, said, code) == (1, "ResidentLostError", 1)


def test_what_a_supervisor_that_was_killed_left_behind_is_deleted_by_the_next_one(short: Path) -> None:
    found = in_a_daemon(
        """
        import signal, tempfile
        tempfile.tempdir = sys.argv[1]
        residents.supervise()
        pid = in_a_worker(lambda: residents.call(0, os.getpid))
        supervisor = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        os.kill(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)
        until_ended(pid)
        before = os.listdir(sys.argv[1])
        residents.supervise()
        print(json.dumps([before, os.listdir(sys.argv[1])]))
    """,
        str(short),
    )
    assert [len(names) for names in found] == [1, 1]
    assert found[0] != found[1]


def test_a_supervisor_whose_daemon_ended_while_it_prepared_ends_even_if_the_signal_is_swallowed(short: Path) -> None:
    script = textwrap.dedent("""
        import os, sys, time
        from aggregations.spark import residents

        def prepare():
            print(os.getpid(), file=sys.stderr, flush=True)
            while os.getppid() == daemon:
                try:
                    time.sleep(0.05)
                except SystemExit:  # as in a callback from C
                    pass

        daemon = os.getpid()
        residents.supervise(prepare)
        time.sleep(600)
    """)
    environment = {**os.environ, "TMPDIR": str(short)}
    daemon = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, env=environment)
    with daemon:
        assert daemon.stderr is not None
        supervisor = int(daemon.stderr.readline())
        daemon.kill()
        assert daemon.stderr.read() == ""  # it is ending: nothing else has this pipe
    deadline = time.monotonic() + 10
    while running(supervisor):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not list(short.iterdir())


def test_an_error_comes_back_as_it_is_and_so_does_that_of_a_result_that_cannot_be_pickled() -> None:
    found = in_a_daemon("""
        print(json.dumps([
            in_a_worker(lambda: residents.call(0, int, "five")),
            in_a_worker(lambda: residents.call(0, open, os.devnull)),
            in_a_worker(lambda: residents.call(0, len, "four")),
        ]))
    """)
    assert found[0] == ["ValueError", "invalid literal for int() with base 10: 'five'"]
    assert found[1][0] == "TypeError"
    assert "cannot pickle" in found[1][1]
    assert found[2] == 4


def test_modules_that_came_after_the_resident_was_started_are_found(tmp_path: Path) -> None:
    (tmp_path / "arrived_later.py").write_text("def answer(): return 42\n")
    found = in_a_daemon(
        """
        def work():
            sys.path.append(sys.argv[1])
            import arrived_later
            return residents.call(0, arrived_later.answer)
        in_a_worker(lambda: residents.call(0, os.getpid))
        print(json.dumps(in_a_worker(work)))
    """,
        str(tmp_path),
    )
    assert found == 42


def test_without_a_supervisor_the_call_is_made_in_the_process_itself() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; from aggregations.spark import residents as r; print(r.call(0, os.getpid) == os.getpid())",
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "True\n"


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a path that a socket's may begin with."""
    with tempfile.TemporaryDirectory(prefix="hw", dir="/tmp") as made:
        yield Path(made)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_residents_end_with_their_daemon_however_it_ends(short: Path, *, busy: bool) -> None:
    script = textwrap.dedent(_DAEMON) + textwrap.dedent("""
        pids = [in_a_worker(lambda: residents.call(slot, os.getpid)) for slot in (0, 1)]
        parent = int(open(f"/proc/{pids[0]}/stat").read().rpartition(")")[2].split()[1])
        print(json.dumps([*pids, parent]), flush=True)
        if sys.argv[1] == "True":
            residents.call(0, time.sleep, 600)
        time.sleep(600)
    """)
    daemon = subprocess.Popen(
        [sys.executable, "-c", script, str(busy)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short)},
    )
    with daemon:
        assert daemon.stdout is not None
        pids = json.loads(daemon.stdout.readline())
        assert all(map(running, pids))
        assert len(list(short.iterdir())) == 1
        daemon.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(running, pids))
    assert list(short.iterdir()) == []


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_freed_memory_stays_for_the_next_batch():
    script = """
        from aggregations.spark.residents import keep_freed_memory
        from resource import RUSAGE_SELF, getrusage

        def faults():
            before = getrusage(RUSAGE_SELF).ru_minflt
            kept = [bytearray(10 << 20) for _ in range(8)]
            del kept
            return getrusage(RUSAGE_SELF).ru_minflt - before

        first, before = faults(), faults()
        keep_freed_memory()
        faults()
        assert faults() < before / 10, (before, faults())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)

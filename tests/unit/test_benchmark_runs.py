"""How the benchmark watches a system: its processes, its commits, and how it ends one."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import measure, processes
from benchmarks.measure import Mark, RunFailed

FAMILY = "import subprocess, sys; one = subprocess.Popen(['sleep', '600']); print(one.pid, flush=True); one.wait()"
BUSY = "import time\nwhile time.process_time() < 0.2: pass"


@pytest.fixture
def started() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    children: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> "subprocess.Popen[bytes]":
        children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.communicate()


def watched(
    child: "subprocess.Popen[bytes]", answers: list[int], log: Path, events: int = 100
) -> tuple[Mark, Mark, Mark]:
    """Watch a process while the broker gives these answers, the last of them again and again."""
    given = iter(answers)
    marks, peak = measure._watch(
        child,
        lambda: next(given, answers[-1]),
        events,
        {"kafka": child.pid},
        time.perf_counter(),
        lambda done: None,
        log,
    )
    assert set(peak) == {"driver"}
    return marks


def test_marks_are_the_first_commit_the_first_at_half_and_the_last(
    started: Callable[..., "subprocess.Popen[bytes]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "POLL_SECONDS", 0.0)
    child = started("sleep", "600")
    marks = watched(child, [0, 0, 20, 49, 61, 90, 100], tmp_path / "log")
    assert [mark.events for mark in marks] == [20, 61, 100]
    assert marks[0].seconds < marks[1].seconds < marks[2].seconds
    assert all(set(mark.cpu) == {"driver", "kafka"} for mark in marks)
    marks = watched(child, [100], tmp_path / "log")
    assert marks[0] == marks[1] == marks[2]


def test_the_cpu_of_a_process_that_has_ended_is_not_taken_for_zero(
    started: Callable[..., "subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    child = started("true")
    child.wait()
    marks = watched(child, [100], tmp_path / "log")
    assert [mark.cpu for mark in marks] == [{}, {}, {}]
    assert measure.Run(*marks, measure.Difference()).warm_cpu is None


def test_a_system_that_ends_early_fails_with_the_end_of_its_log(
    started: Callable[..., "subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    (tmp_path / "log").write_text("starting\n\nout of memory\n")
    child = started(sys.executable, "-c", "raise SystemExit(7)")
    child.wait()
    with pytest.raises(RunFailed, match=r"ended after 50 of 100 events with code 7: starting \| out of memory"):
        watched(child, [50], tmp_path / "log")


def test_a_system_that_commits_nothing_more_fails(
    started: Callable[..., "subprocess.Popen[bytes]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "STALL_SECONDS", 0.0)
    (tmp_path / "log").write_text("")
    with pytest.raises(RunFailed, match="committed nothing for 0 s, at 0 of 100 events: it wrote nothing"):
        watched(started("sleep", "600"), [0], tmp_path / "log")


def test_ending_a_system_ends_what_it_started(started: Callable[..., "subprocess.Popen[bytes]"]) -> None:
    child = started(sys.executable, "-c", FAMILY)
    assert child.stdout is not None
    below = int(child.stdout.readline())
    assert processes.parts(child.pid) == {"driver": [child.pid, below]}
    assert processes.children(child.pid) == [below]
    processes.end(child.pid)
    assert not any(
        Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (child.pid, below) if Path(f"/proc/{pid}").exists()
    )
    assert processes.cpu(child.pid) == 0.0
    assert processes.peak(child.pid) == 0


def test_the_cpu_of_a_process_has_that_of_its_children_that_ended(
    started: Callable[..., "subprocess.Popen[bytes]"],
) -> None:
    work = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}]); print(1, flush=True); input()"
    child = started(sys.executable, "-c", work)
    assert child.stdout is not None
    child.stdout.readline()
    assert processes.cpu(child.pid) >= 0.19
    assert processes.spent({"driver": [child.pid], "jvm": []}).keys() == {"driver", "jvm"}
    assert processes.memory({"driver": [child.pid], "jvm": []})["driver"] > 0

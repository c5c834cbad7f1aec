import os
import signal
import subprocess
import sys

import pytest

from persistence.commit import faults
from persistence.commit.faults import (
    Fault,
    FaultOutcome,
    Injector,
    NoFaults,
    effect,
    from_environment,
    known_points,
    use,
)
from persistence.commit.steps import CommitStep
from persistence.errors import Transient


class Crash(BaseException):
    pass


def crash():
    raise Crash


def reach(point, times, injector):
    """What happened to each of `times` effects at `point`: applied or not, and how the call ended."""
    seen = []
    with use(injector):
        for _ in range(times):
            applied = []
            try:
                effect(point, lambda: applied.append(1))
                seen.append((bool(applied), "returned"))
            except (Crash, Transient) as error:
                seen.append((bool(applied), type(error).__name__))
    return seen


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        ("before", (False, "Crash")),
        ("after", (True, "Crash")),
        ("error", (False, "Transient")),
        ("unanswered", (True, "Transient")),
    ],
)
def test_each_outcome_does_what_the_table_says_at_the_nth_time_only(outcome, end):
    injector = Injector([Fault.parse(f"publish.{outcome}@2")], crash)
    assert reach("publish", 3, injector) == [(True, "returned"), end, (True, "returned")]


def test_without_faults_an_effect_returns_what_its_action_returns():
    with use(NoFaults()):
        assert effect(CommitStep.PUBLISH, lambda: 42) == 42


def test_a_point_without_a_name_stands_for_each_of_its_kind():
    injector = Injector([Fault.parse("persist.error@2")], crash)
    assert reach("persist:a", 1, injector) == [(True, "returned")]
    assert reach("persist:b", 1, injector) == [(False, "Transient")]
    assert reach("persistent", 1, Injector([Fault.parse("persist.error")])) == [(True, "returned")]


def test_several_faults_count_for_themselves():
    injector = Injector(from_environment({faults.SPEC: "publish.error@1, publish.before@2"}).faults, crash)
    assert reach("publish", 3, injector) == [(False, "Transient"), (False, "Crash"), (True, "returned")]


def test_a_stage_name_may_have_dots():
    fault = Fault.parse("persist:carrier.stats.before@3")
    assert (fault.point, fault.outcome, fault.nth) == ("persist:carrier.stats", FaultOutcome.BEFORE, 3)
    assert str(fault) == "persist:carrier.stats.before@3"


@pytest.mark.parametrize(
    "spec",
    ["publish", "publish.later", "publish.before@x", "publish.before@0", "republish:sing.after", "x.after", ".after"],
)
def test_a_spec_that_names_no_fault_is_refused_with_the_known_ones(spec):
    with pytest.raises(ValueError, match=r"use one of epoch, |write POINT|at least 1, not 0"):
        from_environment({faults.SPEC: spec})


def test_every_step_is_a_known_point_and_has_a_text():
    kinds = {point.partition(":")[0] for point in known_points()}
    assert kinds >= {step.value for step in CommitStep}
    assert all(known_points().values())
    for point in known_points():
        Fault(point.replace("STAGE", "x").replace("STORE", "x"), FaultOutcome.ERROR)


def test_no_environment_means_no_faults():
    assert isinstance(from_environment({}), NoFaults)


PROGRAM = """
import sys
from persistence.commit.faults import effect
for n in (1, 2, 3):
    effect("persist:a", lambda: print("applied", n, flush=True))
"""


@pytest.mark.parametrize(("outcome", "applied"), [("before", 1), ("after", 2)])
def test_the_environment_kills_a_real_process(outcome, applied):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, faults.SPEC: f"persist:a.{outcome}@2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split("\n")[:-1] == [f"applied {n + 1}" for n in range(applied)]


def test_a_worker_takes_the_driver_down_with_it():
    driver = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with driver:
        worker = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, faults.SPEC: "persist.before", faults.PID: str(driver.pid)},
            capture_output=True,
        )
        assert driver.wait(10) == -signal.SIGKILL
    assert worker.returncode == -signal.SIGKILL

"""How the error of a task reaches the driver; no Spark is started."""

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest
from pyspark import cloudpickle

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.engine.job import Attempt, Job, RunProgress
from aggregations.engine.options import RunOptions
from aggregations.engine.path import Work
from aggregations.engine.ranges import Slot
from aggregations.engine.retry import may_pass
from aggregations.errors import FlowError, SharedKeyError, TasksLostError
from aggregations.spark import tasks, waiting
from aggregations.spark.action import lost
from aggregations.spark.blocks import Block, Kind, pack, unpack
from persistence.errors import Transient
from persistence.kafka import BrokerUnavailable, KafkaSettings
from persistence.marks import KnownMarks
from persistence.protocol import FlowRef, Write
from tests.support.jobs import changed

FLOW = (
    Flow("fleet").source(Topic("legs", Json({"tail": pl.String}))).aggregate("aircraft", "tail", Fields(legs=count()))
)
REF = FlowRef("fleet", 1)
JOB = Job(
    FLOW,
    RunOptions(kafka=KafkaSettings("nowhere:1"), stores={"aircraft": "memory://x"}),
    RunProgress(ref=REF, epoch=1, batch=1, known=KnownMarks(REF, ["aircraft"])),
    Attempt(routes=2),
)


class OddError(Exception):
    """Cannot be pickled: it is made of more than its text."""

    def __init__(self, what: str, *, why: Callable[[], str]) -> None:
        super().__init__(what)
        self.why = why


def test_tasks_can_be_sent_to_workers() -> None:
    for task in (
        tasks.reading(JOB),
        tasks.publishing(JOB),
        *(make(JOB, FLOW.stages[0]) for make in (tasks.folding, tasks.persisting)),
    ):
        cloudpickle.dumps(task)


WRITES = [Write(b"N%d" % number, 0, b"{}") for number in range(1000)]


def test_states_wait_for_the_job_that_folded_them_and_are_taken_once() -> None:
    """Two runs of a process may have the same flow, epoch, batch and attempt."""
    mine, other = changed(JOB, run="mine", serial=3), changed(JOB, run="other", serial=3)
    waiting.keep(mine, WRITES)
    waiting.keep(other, WRITES[:1])
    for serial in (2, 4):
        with pytest.raises(TasksLostError):
            waiting.take("mine", serial)
    assert waiting.take("mine", 3).writes == WRITES
    with pytest.raises(TasksLostError):
        waiting.take("mine", 3)
    assert waiting.take("other", 3).job is other


def test_a_key_that_another_task_folded_too_is_found_by_its_hash() -> None:
    others = [waiting.keep(JOB, WRITES[500:]), waiting.keep(JOB, [])]
    waiting.keep(JOB, WRITES[:500])
    waiting.take(JOB.progress.run, JOB.attempt.serial).check_not_shared(others)
    waiting.keep(JOB, WRITES[:501])
    with pytest.raises(SharedKeyError, match="stage aircraft"):
        waiting.take(JOB.progress.run, JOB.attempt.serial).check_not_shared(others)


def test_states_that_wait_in_a_resident_and_as_blocks_are_an_error_and_none_is_left_out() -> None:
    job = changed(JOB, run="both", tasks=(Slot(0, ()),))
    rows = pack([*tasks._waiting(job, FLOW.stages[0], WRITES[:1]), *tasks._kept(job, 0, WRITES[1:])])
    blocks = unpack(list(tasks.persisting(job, FLOW.stages[0])(rows)))
    _, failures = tasks.outcome_of(blocks)
    assert [type(one) for one in failures] == [AssertionError] * job.attempt.routes
    assert waiting.take("both", 0).writes == WRITES[1:], "nothing was persisted"


@pytest.mark.parametrize("wait", [tasks._kept, lambda job, _, writes: tasks._waiting(job, FLOW.stages[0], writes)])
def test_states_that_wait_are_not_persisted_once_any_task_failed(wait: Callable[..., list[Block]]) -> None:
    """A stage downstream may have failed: what is persisted here would be dropped there when the batch is repeated."""
    job = changed(JOB, run="failed", tasks=(Slot(0, ()),))
    blocks = [*wait(job, 0, WRITES), *tasks._failed(job.attempt.routes, Transient("downstream", "Try again"))]
    for route in range(job.attempt.routes):
        mine = pack(one for one in blocks if one.route == route)
        _, failures = tasks.outcome_of(unpack(tasks.persisting(job, FLOW.stages[0])(mine)))
        assert [str(one) for one in failures] == ["downstream. Try again"]


def failure(error: BaseException) -> Exception:
    def the_place_where_it_happened(_work: Work) -> list[Block]:
        raise error

    blocks = tasks._guarded(JOB, [], the_place_where_it_happened)
    assert [(one.route, one.kind) for one in blocks] == [(0, Kind.FAILURE), (1, Kind.FAILURE)]
    _, failures = tasks.outcome_of(blocks)
    return failures[0]


@pytest.mark.parametrize(
    "error", [ValueError("five"), Transient("no answer", "Try again"), BrokerUnavailable("no answer", "Try again")]
)
def test_the_error_of_a_task_reaches_the_driver_with_its_place(error: Exception) -> None:
    found: Any = failure(error)
    assert (type(found), str(found)) == (type(error), str(error))
    assert "the_place_where_it_happened" in found.__notes__[0]


def test_a_panic_of_polars_is_an_error_of_the_task_and_an_interrupt_is_not() -> None:
    found: Any = failure(pl.exceptions.PanicException("index out of bounds"))
    assert isinstance(found, RuntimeError)
    assert "PanicException" in str(found)
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)):
            failure(error)


def test_an_error_that_cannot_cross_is_named_by_type_and_place_and_not_quoted() -> None:
    found: Any = failure(OddError("a payload", why=lambda: "odd"))
    assert "OddError" in str(found)
    assert "a payload" not in str(found)
    assert "the_place_where_it_happened" in found.__notes__[0]


WORKER = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 1 times, most recent failure: Lost task 0.0
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "serializers.py", line 1, in loads
    return cloudpickle.loads(obj, encoding=encoding)
ModuleNotFoundError: No module named 'shop'

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:"""


def test_a_worker_that_lacks_a_module_ends_the_run_and_other_losses_are_tried_again() -> None:
    found = lost(WORKER)
    assert isinstance(found, FlowError)
    assert "No module named 'shop'" in str(found)
    assert not may_pass(found)
    for text, said in (
        (WORKER.replace("ModuleNotFoundError: No module named 'shop'", "MemoryError"), "MemoryError. Check"),
        ("Job aborted: executor lost\n\nDriver stacktrace:", "Job aborted: executor lost. Check"),
        (
            "EOFException occurred while reading the port number.",
            "EOFException occurred while reading the port number. C",
        ),
        ("", "no reason given. Check"),
    ):
        assert str(lost(text)).startswith(said)
        assert may_pass(lost(text))

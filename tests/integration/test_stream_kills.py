"""A run on Spark that is killed before and after each of Spark's own logs, whatever becomes of its checkpoint."""

import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path as File
from typing import Literal

import pytest

from persistence.cassandra import apply_schema
from persistence.commit.faults import STREAM_BEGIN, STREAM_PLAN, Fault, FaultOutcome
from persistence.commit.steps import CommitStep
from tests.support.flows import fleet, totals
from tests.support.runs import BUCKETS, ONE_NODE, Jvm, Run, check_invariants, some_legs
from tests.support.world import World, republished

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

Checkpoint = Literal["kept", "lost", "damaged"]
FAULTS = (
    Fault(STREAM_PLAN, FaultOutcome.BEFORE, 1),
    Fault(STREAM_PLAN, FaultOutcome.AFTER, 2),  # planned, and not in the log of offsets
    Fault(STREAM_BEGIN, FaultOutcome.BEFORE, 2),  # in the log of offsets
    Fault(CommitStep.PERSIST.of("carrier"), FaultOutcome.AFTER, 1),
    Fault(CommitStep.MANIFEST.of("aircraft"), FaultOutcome.AFTER, 2),
    Fault(CommitStep.RETURN, FaultOutcome.BEFORE, 2),  # committed, and not in the log of commits
    Fault(CommitStep.OFFSETS, FaultOutcome.AFTER, 2),
    Fault(STREAM_PLAN, FaultOutcome.BEFORE, 3),  # in the log of commits
)


@pytest.fixture(
    params=["lmdb", pytest.param("redis", marks=pytest.mark.kills), pytest.param("cassandra", marks=pytest.mark.kills)]
)
def world(request: pytest.FixtureRequest, kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[World]:
    if request.param == "lmdb":
        url = f"lmdb://{tmp_path}/states"
    elif request.param == "redis":
        url = f"{request.getfixturevalue('redis_url')}?buckets={BUCKETS}&prefix=stream-{uuid.uuid4().hex[:8]}"
    else:
        url = (
            f"{request.getfixturevalue('cassandra_url')}/stream_{uuid.uuid4().hex[:8]}?replication=1&buckets={BUCKETS}"
        )
        apply_schema(url)
    names = topic(partitions=2, name="legs"), topic(name="dead")
    with closing(World(kafka, *names, tmp_path, urls={"aircraft": url, "carrier": url})) as world:
        yield world


def _damage(checkpoint: File) -> None:
    """Empty the newest file of both logs, as a loss of power can."""
    for log in (checkpoint / "offsets", checkpoint / "commits"):
        if log.exists() and (files := [one for one in log.iterdir() if one.name.isdigit()]):
            max(files, key=lambda one: int(one.name)).write_text("")


@pytest.mark.parametrize(
    "checkpoint", ["kept", *(pytest.param(one, marks=pytest.mark.kills) for one in ("lost", "damaged"))]
)
def test_a_run_that_is_killed_around_sparks_logs_is_exact_in_the_end(
    world: World, tmp_path: File, jvm: Jvm, checkpoint: Checkpoint
) -> None:
    flow, directory, sent = fleet(world.topic), tmp_path / "checkpoint", some_legs(40 * (len(FAULTS) + 1))
    started: list[Run] = []

    def run(fault: str, **options: object) -> Run:
        given = {"checkpoint": str(directory), "accept": ONE_NODE if "cassandra" in str(world.urls) else [], **options}
        started.append(Run(world, ("fleet", world.topic), fault, jvm=jvm, **given))
        return started[-1]

    try:
        for n, fault in enumerate(FAULTS):
            world.send(republished(sent, range(max(0, 40 * n - 10), 40 * n + 40)))
            killed = run(str(fault), max_records=12)
            assert killed.wait() == -signal.SIGKILL, f"{fault} was not met: {killed.errors}"
            check_invariants(world, flow)
            if checkpoint == "lost":
                shutil.rmtree(directory, ignore_errors=True)
            elif checkpoint == "damaged" and directory.exists():
                _damage(directory)
                refused = run("")
                if refused.wait() != 0:  # Spark may not need the file
                    assert "remove it: progress is in the stores" in refused.errors
                    shutil.rmtree(directory)
        world.send(republished(sent, range(40 * len(FAULTS) - 10, len(sent))))
        last = run("")
        assert last.wait() == 0, last.errors
    finally:
        for process in started:
            process.end()
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")


@pytest.mark.kills
def test_two_drivers_on_one_checkpoint_are_exact_and_the_older_one_ends(world: World, tmp_path: File) -> None:
    flow, sent, directory = fleet(world.topic), some_legs(120), str(tmp_path / "checkpoint")
    accepted = {"accept": ONE_NODE if "cassandra" in str(world.urls) else []}
    world.send(republished(sent, range(80)))
    frozen = Run(world, ("fleet", world.topic), max_records=20, freeze=True, checkpoint=directory, **accepted)
    successors = []
    try:
        frozen.await_freeze()
        for start in (60, 90):
            successors.append(Run(world, ("fleet", world.topic), checkpoint=directory, **accepted))
            assert successors[-1].wait() == 0, successors[-1].errors
            if start == 60:
                frozen.signal(signal.SIGCONT)  # Spark writes its log of commits after that of its successor
                assert frozen.wait() == 1
                assert "If another query uses it, end that" in frozen.errors or "Fenced" in frozen.errors
            world.send(republished(sent, range(start, start + 30)))
        successors.append(Run(world, ("fleet", world.topic), checkpoint=directory, **accepted))
        assert successors[-1].wait() == 0, successors[-1].errors
    finally:
        for process in (frozen, *successors):
            process.end()
    world.check(flow)
    assert world.results(flow, "aircraft") == totals(sent, "tail")
    assert world.results(flow, "carrier") == totals(sent, "carrier")

"""Stages in different real stores: order across them, epochs, crashes, zombies, and copies of an older moment.

Run by the in-memory runner, whose commit and stores are the real ones; no Spark is needed to see these.
"""

import shutil
import uuid
from pathlib import Path

import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.memory import MemoryRunner
from persistence.cassandra import apply_schema
from persistence.commit import faults
from persistence.commit.faults import Fault, Injector
from persistence.commit.steps import CommitStep
from persistence.errors import Fenced
from tests.support.pure import bare, leg

pytestmark = pytest.mark.integration

BATCHES = [
    [leg(offset, f"N{offset % 7}", carrier=f"C{offset % 3}", minutes=offset) for offset in range(begin, begin + 40)]
    for begin in range(0, 160, 40)
]
RECORDS = [record for batch in BATCHES for record in batch]


class Crash(BaseException):
    """Simulates SIGKILL."""


def crash():
    raise Crash


def flow() -> Flow:
    return (
        Flow(f"mixed-{uuid.uuid4().hex[:8]}")
        .source(bare())
        .aggregate("aircraft", "tail", Fields(legs=count(), minutes=total("minutes")))
        .aggregate("carrier", "carrier", Fields(legs=count(), minutes=total("minutes")))
    )


@pytest.fixture(params=["redis, cassandra", "cassandra, redis", "sqlite, redis", "redis, sqlite"])
def stores(request, tmp_path, redis_url) -> dict[str, str]:
    def url(kind: str) -> str:
        if kind == "sqlite":
            return f"sqlite://{tmp_path}/states.db"
        if kind == "redis":
            return redis_url
        place = f"{request.getfixturevalue('cassandra_url')}/mixed?replication=1&buckets=4"
        apply_schema(place)
        return place

    up, down = request.param.split(", ")
    return {"aircraft": url(up), "carrier": url(down)}


def plain(stage: str) -> dict[bytes, dict[str, int]]:
    sums: dict[bytes, dict[str, int]] = {}
    for offset in range(160):
        key = f"N{offset % 7}" if stage == "aircraft" else f"C{offset % 3}"
        state = sums.setdefault(key.encode(), {"legs": 0, "minutes": 0})
        state["legs"] += 1
        state["minutes"] += offset
    return sums


def is_exact(runner: MemoryRunner) -> None:
    for stage in ("aircraft", "carrier"):
        assert runner.results(stage) == plain(stage)


def go_on(of: Flow, stores: dict[str, str]) -> MemoryRunner:
    """A new run reads what is left, from its own offset on, as Spark would."""
    runner = MemoryRunner(of, stores)
    start = runner.run.start.get(("legs", 0), 0)
    left = RECORDS[start:]
    for begin in range(0, len(left), 30):
        runner.process(left[begin : begin + 30])
    return runner


def test_a_crash_at_every_step_across_two_stores_is_exact(stores) -> None:
    points = [
        CommitStep.PERSIST.of("carrier"),
        CommitStep.PERSIST.of("aircraft"),
        "manifest:carrier",
        "manifest:aircraft",
    ]
    of = flow()
    for point in points:
        for outcome in ("before", "after"):
            with pytest.raises(Crash), faults.use(Injector([Fault.parse(f"{point}.{outcome}@2")], crash)):
                runner = MemoryRunner(of, stores)
                start = runner.run.start.get(("legs", 0), 0)
                for begin in range(start, min(start + 40, 150), 4):
                    runner.process(RECORDS[begin : begin + 4])
    is_exact(go_on(of, stores))


def test_a_run_that_was_overtaken_changes_nothing_in_either_store(stores) -> None:
    of = flow()
    old = MemoryRunner(of, stores)
    old.process(BATCHES[0])
    new = MemoryRunner(of, stores)
    with pytest.raises(Fenced):
        old.process(BATCHES[1])
    for batch in BATCHES[1:]:
        new.process(batch)
    with pytest.raises(Fenced):
        old.process(BATCHES[2])
    is_exact(new)


def test_a_run_overtaken_between_its_two_stores_leaves_what_the_newer_one_finishes(stores) -> None:
    of = flow()
    old = MemoryRunner(of, stores)
    overtaken: list[MemoryRunner] = []

    class Overtake:
        """The newer run begins when the older one has written its downstream store."""

        begun = False

        def effect(self, point, action):
            if point == CommitStep.PERSIST.of("aircraft") and not self.begun:
                self.begun = True
                overtaken.append(go_on(of, stores))
            return action()

    with faults.use(Overtake()), pytest.raises(Fenced):
        old.process(BATCHES[0])
    is_exact(overtaken[0])


def copy_of(path: Path, to: Path) -> None:
    for part in path.parent.glob(f"{path.name}*"):
        shutil.copy(part, to / part.name)


@pytest.fixture
def files(tmp_path, redis_url):
    """SQLite upstream of Redis or downstream of it, and a way to bring back its file of an earlier moment."""
    return tmp_path / "live" / "states.db", tmp_path / "copy", redis_url


@pytest.mark.parametrize("restored", ["aircraft", "carrier"])
def test_an_upstream_store_of_an_older_moment_is_filled_again_and_a_downstream_one_is_refused(files, restored) -> None:
    live, copy, redis = files
    live.parent.mkdir()
    copy.mkdir()
    urls = {"aircraft": redis, "carrier": redis, restored: f"sqlite://{live}"}
    of = flow()
    runner = MemoryRunner(of, urls)
    runner.process(BATCHES[0])
    runner.process(BATCHES[1])
    runner.close()
    copy_of(live, copy)
    runner = MemoryRunner(of, urls)
    runner.process(BATCHES[2])
    runner.close()
    for part in live.parent.iterdir():
        part.unlink()
    copy_of(copy / live.name, live.parent)
    if restored == "aircraft":
        is_exact(go_on(of, urls))
        return
    with pytest.raises(RunRefusedError, match="--accept downstream-behind"):
        MemoryRunner(of, urls)


def test_an_empty_downstream_store_is_refused(files) -> None:
    live, _, redis = files
    live.parent.mkdir()
    urls = {"aircraft": redis, "carrier": f"sqlite://{live}"}
    of = flow()
    runner = MemoryRunner(of, urls)
    runner.process(BATCHES[0])
    runner.close()
    for part in live.parent.iterdir():
        part.unlink()
    with pytest.raises(RunRefusedError, match="--accept store-empty"):
        MemoryRunner(of, urls)

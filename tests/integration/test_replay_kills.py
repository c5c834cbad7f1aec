"""Rebuilds and swaps as processes: killed at every kind of step while the flow goes on, and a run that was frozen."""

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path as File

import pytest

from aggregations.local import run_local
from jobs.cli.errors import Exit
from jobs.replay import pointer_of
from jobs.views import states
from persistence.cassandra import apply_schema
from persistence.commit.faults import SPEC
from tests.messages import Leg
from tests.support.flows import fleet
from tests.support.runs import EVERY, ROOT, Run, some_legs
from tests.support.world import World, alone, republished

pytestmark = [pytest.mark.integration, pytest.mark.slow]

APPLY = [
    *("pointer.before", "pointer.after@3", "epoch.after", "epoch.after@3", "dead_letter.after"),
    *("persist:carrier.after", "manifest:carrier.after", "finish.after"),
]
"""Points of a rebuild in two stores: a change of the pointer has four, the first at its beginning and one at its end."""
SWAP = [
    "pointer.after@5",
    "pointer.after@7",
    "held.before",
    "held.after",
    "held.after@2",
    "pointer.after@6",
    "pointer.after@7",
]
"""Points of a swap, each killed one continued by the next: the live generation is closed, in one store first; dead letters
leave; and it is noted, in one store first, that states are published. Worlds kill it in the rest."""
DEAD = alone(Leg(tail="N1", carrier="AA", minutes=-1))


def stores_of(kind: str, request: pytest.FixtureRequest, directory: File) -> dict[str, str]:
    """Two stores of a kind: a command is killed between them, too."""
    if kind == "embedded":
        return {"aircraft": f"sqlite:///{directory}/a.db", "carrier": f"lmdb://{directory}/c"}
    name = uuid.uuid4().hex[:8]
    if kind == "redis":
        server = request.getfixturevalue("redis_url")
        return {stage: f"{server}?prefix={stage}-{name}" for stage in ("aircraft", "carrier")}
    server = request.getfixturevalue("cassandra_url")
    urls = {stage: f"{server}/{stage}_{name}?replication=1&buckets=8" for stage in ("aircraft", "carrier")}
    for url in urls.values():
        apply_schema(url)
    return urls


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("redis", marks=pytest.mark.kills),
        pytest.param("cassandra", marks=pytest.mark.kills),
    ]
)
def world(request: pytest.FixtureRequest, kafka: str, topic: Callable[..., str], tmp_path: File) -> Iterator[World]:
    urls = stores_of(request.param, request, tmp_path)
    made = World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, urls=urls, runner=run_local)
    code = f"from tests.support.flows import fleet\nflow = fleet({made.topic!r})\nout = flow.publish({topic(name='out')!r})\n"
    (tmp_path / "flights.py").write_text(code)
    with closing(made) as world:
        yield world


def headwater(world: World, command: str, *options: str, fault: str = "") -> tuple[int, str]:
    """Run a command as a process; return its exit code and what it said."""
    stores = [f"--store={stage}={url}" for stage, url in world.stores(fleet(world.topic)).items()]
    letters = ["--dead-letters", world.dead] if command == "run" or {"--apply", "--swap"} & {*options} else []
    one_copy = "cassandra" in stores[0] and (command == "run" or not {"snapshot", "--abandon"} & {command, *options})
    accept = ["--accept", "replication-1"] if one_copy else []
    kafka = [] if command == "snapshot" else ["--bootstrap", world.settings.bootstrap]
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", command, "flights:out", *options, *stores, *letters, *accept, *kafka],
        cwd=world.directory,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT), SPEC: fault},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


def run(world: World) -> tuple[int, str]:
    return headwater(world, "run", "--runner", "local", "--until-caught-up")


def replay(world: World, form: str, *options: str, fault: str = "") -> tuple[int, str]:
    runner = ["--runner", "local"] if form in ("--apply", "--swap") else []
    return headwater(world, "replay", form, *options, "--reason", "a test", *runner, fault=fault)


@pytest.mark.parametrize("every", EVERY)
def test_a_rebuild_and_a_swap_that_are_killed_are_exact_in_the_end(world: World, every: int) -> None:
    flow, sent, size = fleet(world.topic), some_legs(440), 20
    parts = iter(range(0, len(sent), size))

    def more() -> None:
        first = next(parts)
        world.send([*republished(sent, range(max(0, first - 5), first + size)), DEAD])

    more()
    code, said = run(world)
    assert code == Exit.DONE, said
    for fault in APPLY[::every]:
        more()
        assert replay(world, "--apply", fault=fault)[0] == -signal.SIGKILL, fault
        code, said = run(world)
        assert code == Exit.DONE, said
        assert pointer_of(flow, world.stores(flow)).live == 1
    assert replay(world, "--apply")[0] == Exit.DONE
    killed = []
    for fault in SWAP:
        more()
        code, said = replay(world, "--swap", fault=fault)
        assert code == -signal.SIGKILL, f"{fault}: {said}"
        killed.append(fault)
        code, said = run(world)
        assert code == Exit.DONE or (code == Exit.REFUSED and "headwater replay --swap" in said), said
        if pointer_of(flow, world.stores(flow)).live == 2:
            break
    assert killed == SWAP
    assert replay(world, "--swap")[0] == Exit.DONE
    code, said = replay(world, "--swap")
    assert (code, "no generation is being rebuilt" in said) == (Exit.REFUSED, True)
    for first in parts:
        world.send(republished(sent, range(first, first + size)))
    assert run(world)[0] == Exit.DONE
    world.check(flow)
    generations = {letter.generation for letter, _ in world.dead_letters()}
    assert generations == {1, 2}
    assert replay(world, "--rollback")[0] == Exit.DONE
    assert run(world)[0] == Exit.DONE
    assert pointer_of(flow, world.stores(flow)).live == 1
    world.check(flow)


@pytest.mark.kills
def test_a_rebuild_from_a_snapshot_and_a_drop_that_are_killed_are_repeated(world: World) -> None:
    flow, sent = fleet(world.topic), some_legs(200)
    world.send([*republished(sent, range(80)), DEAD])
    assert run(world)[0] == Exit.DONE
    code, said = headwater(world, "snapshot", "--to", "fleet.snapshot")
    assert code == Exit.DONE, said
    world.send([*republished(sent, range(60, 140)), DEAD])
    assert run(world)[0] == Exit.DONE
    begin = ["--snapshot", "fleet.snapshot", "--outputs", "send"]
    for fault in ("restore.after", "restore.after@3", "restore.before@6", "publish.after", "persist:carrier.after"):
        code, said = replay(world, "--apply", *begin, fault=fault)
        assert code == -signal.SIGKILL, said
        begin = []
        assert run(world)[0] == Exit.DONE
    for form, fault in (("--swap", "held.after@3"), ("--swap", ""), ("--rollback", ""), ("--rollback", "")):
        code, said = replay(world, form, fault=fault)
        assert code == (-signal.SIGKILL if fault else Exit.DONE), said
    assert pointer_of(flow, world.stores(flow)).live == 2
    for fault in ("drop.before", "drop.after", "drop.before@4", "drop.after@8", ""):
        code, said = replay(world, "--drop", "1", "--accept", "no-rollback", fault=fault)
        assert code == (-signal.SIGKILL if fault else Exit.DONE), said
    world.send(republished(sent, range(120, 200)))
    assert run(world)[0] == Exit.DONE
    world.check(flow)


def test_a_run_that_was_frozen_during_the_swap_writes_nothing_afterwards(world: World) -> None:
    flow, sent = fleet(world.topic), some_legs(200)
    world.send(republished(sent))
    accept = ["replication-1"] if "cassandra" in world.stores(flow)["aircraft"] else []
    frozen = Run(world, ("fleet", world.topic), local=True, max_records=10, freeze=True, accept=accept)
    try:
        frozen.await_freeze()
        for form in ("--apply", "--swap"):
            code, said = replay(world, form)
            assert code == Exit.DONE, said
        before = [*states(flow, "aircraft", world.stores(flow), generation=1)]
        frozen.signal(signal.SIGCONT)
        assert frozen.wait() == 1
        assert "Fenced" in frozen.errors
    finally:
        frozen.end()
    assert [*states(flow, "aircraft", world.stores(flow), generation=1)] == before
    assert run(world)[0] == Exit.DONE
    world.check(flow)

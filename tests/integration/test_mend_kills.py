"""Mends as processes, with states in two stores: killed at every kind of step, and repeated, or the flow goes on first."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aggregations.local import run_local
from jobs.cli.errors import Exit
from jobs.replay import pointer_of
from persistence.commit.faults import SPEC
from tests.support.flows import fleet
from tests.support.refolding import tamper
from tests.support.runs import ROOT, some_legs
from tests.support.world import World, republished

pytestmark = [pytest.mark.integration, pytest.mark.slow]

KILLED = [
    "pointer.before",
    "pointer.after@4",
    *(f"mend.{when}@{nth}" for nth in range(1, 6) for when in ("before", "after")),
]
"""Points of a mend in two stores: a change of the pointer has four; two manifests, the states, two manifests."""


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: Path) -> Iterator[World]:
    urls = {"aircraft": f"lmdb://{tmp_path}/a", "carrier": f"sqlite:///{tmp_path}/c.db"}
    made = World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, urls=urls, runner=run_local)
    (tmp_path / "flights.py").write_text(f"from tests.support.flows import fleet\nflow = fleet({made.topic!r})\n")
    with closing(made) as world:
        yield world


def mend(world: World, *options: str, fault: str = "") -> tuple[int, str]:
    """Run the command as a process; return its exit code and what it said."""
    stores = [f"--store={stage}={url}" for stage, url in world.stores(fleet(world.topic)).items()]
    keys = ["--stage", "aircraft", "--key", "N1", "--key", "N2"]
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", "replay", "flights:flow", *keys, *options, *stores]
        + ["--bootstrap", world.settings.bootstrap],
        cwd=world.directory,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT), SPEC: fault},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.kills
def test_a_mend_that_is_killed_at_every_kind_of_step_is_repeated(world: World) -> None:
    flow, sent, size = fleet(world.topic), some_legs(260), 20
    world.send(republished(sent, range(size)))
    world.run(flow)
    for number, fault in enumerate(KILLED, start=1):
        tamper(world, flow, "aircraft", b"N1", minutes=-number)
        tamper(world, flow, "aircraft", b"N2", legs=-number)
        code, said = mend(world, "--apply", "--reason", "a test", fault=fault)
        assert code == -signal.SIGKILL, f"{fault}: {said}"
        if number % 2:  # copies of earlier records, and new ones
            world.send(republished(sent, range(number * size - 5, number * size + size)))
            world.run(flow)
        code, said = mend(world, "--apply", "--reason", "repeated")
        assert code == Exit.DONE, said
        world.check(flow)
        assert "nothing to mend" in mend(world)[1]
    changes = pointer_of(flow, world.stores(flow)).changes
    assert {one.what for one in changes} == {"mend"}
    assert changes[-1].states.startswith("stage aircraft, key N1")


def test_the_command_shows_the_difference_and_what_it_did(world: World) -> None:
    flow = fleet(world.topic)
    world.send(republished(some_legs(60)))
    world.run(flow)
    right = world.results(flow, "aircraft")[b"N1"]
    tamper(world, flow, "aircraft", b"N1", minutes=right["minutes"] + 7)
    code, said = mend(world)
    assert code == Exit.DONE
    assert ["aircraft", "minutes", "1", "-7", "-7"] in [line.split() for line in said.splitlines()]
    assert "1 state to mend; nothing is written without --apply --reason TEXT" in said
    assert "not touched: carrier" in said
    code, said = mend(world, "--apply", "--reason", "a bad disk")
    assert (code, "1 state of stage aircraft mended in generation 1" in said) == (Exit.DONE, True)
    assert world.results(flow, "aircraft")[b"N1"] == right
    code, said = mend(world, "--key", "N99")
    assert (code, "no state of key N99" in said) == (Exit.REFUSED, True)

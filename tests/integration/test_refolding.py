"""`headwater rehearse` and `headwater audit` as commands, and killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aggregations.local import run_local
from jobs.cli.errors import Exit
from tests.messages import Leg
from tests.support.cli import run as headwater
from tests.support.refolding import tamper, untouched
from tests.support.world import Sent, World, alone, legs, republished

pytestmark = [pytest.mark.integration]

ROOT = Path(__file__).parents[2]
FLOWS = """
import time
from pathlib import Path

import polars as pl

from aggregations import Fields, Flow, Topic, count, total
from tests.messages import Leg

source = Flow("fleet").source(Topic({topic!r}, payload=Leg))
flow = source.aggregate("aircraft", "tail", Fields(legs=count(), minutes=total("minutes")))
doubled = source.aggregate("aircraft", "tail", Fields(legs=count(), minutes=total(pl.col("minutes") * 2)))


class Waits:
    def zero(self):
        return 0

    def fold(self, state, element):
        if Path("waiting").exists():
            Path("waiting").rename("waits")
            time.sleep(600)
        return state + 1


waits = source.aggregate("aircraft", "tail", Waits())
"""


class Shop:
    """A topic, live states of it, and the module of the flow in the current directory."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self._monkeypatch = world, monkeypatch
        self.module = f"flows_{uuid.uuid4().hex}"  # imported once in this process
        (world.directory / f"{self.module}.py").write_text(FLOWS.format(topic=world.topic))
        monkeypatch.chdir(world.directory)
        monkeypatch.syspath_prepend(str(world.directory))
        self.flow = __import__(self.module).flow
        world.send([*republished(legs(80), [*range(60), *range(40, 80)]), Sent(b"no envelope")])
        world.run(self.flow)

    def words(self, command: str, flow: str, *options: str) -> list[str]:
        return [
            command,
            f"{self.module}:{flow}",
            "--bootstrap",
            self.world.settings.bootstrap,
            "--work",
            "work",
            *options,
        ]

    def command(self, command: str, flow: str, *options: str) -> int:
        return headwater(self._monkeypatch, *self.words(command, flow, *options))

    def rehearse(self, new: str, *options: str) -> int:
        return self.command("rehearse", new, "--against", f"{self.module}:flow", *options)

    def audit(self, *options: str) -> int:
        [store] = set(self.world.stores(self.flow).values())
        return self.command("audit", "flow", "--store", store, *options)

    def left(self) -> list[str]:
        """What is in the directory of the work."""
        return sorted(one.name for one in Path("work").iterdir())


@pytest.fixture
def shop(kafka: str, topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    made = World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, runner=run_local)
    with closing(made) as world:
        yield Shop(world, monkeypatch)


def line(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_rehearsal_shows_the_differences(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    before = untouched(shop.world, shop.flow)
    assert shop.rehearse("flow") == Exit.DONE
    assert "no differences: 8 keys" in capsys.readouterr().err
    assert shop.rehearse("doubled", "--json", "--sample", "1") == Exit.DIFFERENCES
    found = line(capsys)
    minutes = sum(leg.minutes for leg in legs(80))
    aircraft = found["stages"]["aircraft"]
    assert (aircraft["changed"], aircraft["same"], found["differs"]) == (8, 0, True)
    assert aircraft["fields"]["minutes"]["sum"] == minutes
    assert len(aircraft["sample"]) == 1
    assert found["old"] == found["new"] == {
        "records": 101, "dead_letters": {"not_an_envelope": 1}, "outputs": 0, "states": {"aircraft": 8},
    }  # fmt: skip
    assert shop.rehearse("doubled", "--key", "N1", "--stage", "aircraft") == Exit.DIFFERENCES
    out, err = capsys.readouterr()
    assert "different: 1 of 1 key" in err
    assert "sum of new - old" in out
    assert shop.rehearse("flow", "--range", f"{shop.world.topic}:0:9-1", "--json") == Exit.REFUSED
    assert "reversed" in line(capsys)["refused"]
    assert shop.rehearse("flow", "--range", f"{shop.world.topic}:0:x") == Exit.USAGE
    assert shop.rehearse("flow", "--accept", "everything") == Exit.USAGE
    assert "unknown risk everything" in capsys.readouterr().err
    assert shop.left() == ["lock"]
    assert untouched(shop.world, shop.flow) == before


def test_an_audit_shows_the_drift(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    assert shop.audit() == Exit.DONE
    assert "no differences: 8 keys" in capsys.readouterr().err
    tamper(shop.world, shop.flow, "aircraft", b"N1", legs=0)
    assert shop.audit("--json") == Exit.DIFFERENCES
    found = line(capsys)
    assert (found["drifted"], found["stages"]["aircraft"]["changed"], found["listed"]) == (True, 1, [1, 1])
    assert found["ranges"][shop.world.topic].keys() == {"0", "1"}
    assert shop.audit("--key", "N1") == Exit.DIFFERENCES
    out, err = capsys.readouterr()
    assert "different: 1 of 1 key" in err
    assert "only folded" in out
    assert shop.audit("--key", "N2") == Exit.DONE
    assert shop.audit("--key", "nobody") == Exit.REFUSED
    assert "no state of key nobody" in capsys.readouterr().err
    assert shop.audit("--snapshot", "none") == Exit.USAGE
    assert shop.command("audit", "doubled", "--store", f"sqlite://{shop.world.directory}/states.db") == Exit.REFUSED
    assert "with the code that made them" in capsys.readouterr().err
    assert shop.left() == ["lock"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_command_that_is_killed_leaves_the_live_states_alone_and_the_next_one_clears_up(
    shop: Shop, number: signal.Signals
) -> None:
    before = untouched(shop.world, shop.flow)
    waiting = Path("waiting")
    waiting.touch()
    words = shop.words("rehearse", "waits", "--against", f"{shop.module}:waits")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(shop.world.directory)])}
    process = subprocess.Popen([sys.executable, "-m", "jobs.cli", *words], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not Path("waits").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(shop.left()) == 2
        process.send_signal(number)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert code == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert len(shop.left()) == (2 if number == signal.SIGKILL else 1)
    assert shop.rehearse("waits", "--key", "N1") == Exit.DIFFERENCES  # another definition than that of the flow
    assert shop.left() == ["lock"]
    assert untouched(shop.world, shop.flow) == before


def test_a_rehearsal_of_what_nobody_reads_finds_no_key(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    shop.world.send([alone(Leg(tail="NEW", carrier="AA", minutes=1))])
    assert shop.audit("--key", "NEW") == Exit.REFUSED  # the flow has not read it
    assert shop.rehearse("flow", "--key", "NEW") == Exit.DONE
    assert "no differences: 1 key" in capsys.readouterr().err

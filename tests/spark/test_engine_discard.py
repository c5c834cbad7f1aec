"""Dead letters are redriven to their partition, or discarded so that a state with too many holes can continue."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from envelope import Reason
from envelope.dedup.histories import HOLES, HolesFullError
from jobs.dead_letters import redrive as redriving
from jobs.dead_letters.redrive import redrive
from tests.messages import Leg
from tests.support.cli import run
from tests.support.flows import fleet, totals
from tests.support.world import Sent, World, alone, legs, verdicts

pytestmark = [pytest.mark.spark, pytest.mark.integration]

TOO_MUCH = 2**62  # minutes; two of them are more than 64 bits hold


def headwater(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Run a command here and return its one line of JSON."""
    capsys.readouterr()
    code = run(monkeypatch, *arguments, "--json")
    out, err = capsys.readouterr()
    assert not code, err
    return json.loads(out)


@pytest.mark.parametrize("stage", ["aircraft", "carrier"])
def test_a_state_that_is_full_of_holes_stops_the_flow_until_its_letters_are_discarded(
    world: World, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = fleet(world.topic)
    half: Any = Leg(tail="N9", carrier="ZZ", minutes=TOO_MUCH)
    # Too much for its aircraft, or only for the carrier: every one flies with another aircraft then.
    bad = [Leg(tail="N9" if stage == "aircraft" else f"X{i}", carrier="ZZ", minutes=TOO_MUCH) for i in range(HOLES + 1)]
    world.send(alone(leg, partition=0) for leg in [half, *bad[:HOLES]])
    assert world.run(flow).reasons == {Reason.OVERFLOW: HOLES}
    good = legs(20)
    world.send(alone(leg, partition=0) for leg in [bad[HOLES], *good])
    with pytest.raises(HolesFullError, match=rf"stage {stage}, {world.topic}:0:{HOLES + 1} .*`headwater discard`"):
        world.run(flow)

    (tmp_path / "full.py").write_text(f"from tests.support.flows import fleet\n\nflow = fleet({world.topic!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "full", raising=False)
    command = ["discard", "full:flow", "--from", world.dead, "--bootstrap", world.settings.bootstrap]
    command += ["--store", next(iter(world.stores(flow).values()))]
    wanted = [{"topic": world.topic, "stage": stage, "reason": "overflow", "count": HOLES}]
    before = world.views(flow, stage)
    told = headwater(monkeypatch, capsys, *command)
    assert (told["applied"], told["discarded"]) == (False, wanted)
    assert world.views(flow, stage) == before
    assert headwater(monkeypatch, capsys, *command, "--apply")["discarded"] == wanted
    told = headwater(monkeypatch, capsys, *command, "--apply")
    assert (told["discarded"], told["no_hole"], told["unusable"]) == ([], HOLES, {})

    assert world.run(flow).reasons == {Reason.OVERFLOW: 1}
    folded = totals([half, *good], "carrier")
    assert world.results(flow, "carrier") == folded
    # What was discarded is not folded when it is redriven after all; the dead letter that still has its hole is.
    redrive(world.settings, world.dead, apply=True)
    report = world.run(flow)
    assert set(verdicts(report)[stage]) <= {"duplicate", "copy", "rejected"}
    assert world.results(flow, "carrier") == folded


def test_a_letter_goes_back_to_the_partition_where_it_died_and_by_its_key_when_that_is_gone(world: World) -> None:
    flow = fleet(world.topic)
    sent = [Sent(alone(Leg(tail="N1", carrier="AA", minutes=-5)).value, b"N1", partition=n) for n in (0, 0, 1)]
    world.send(sent)
    world.run(flow)
    assert redrive(world.settings, world.dead, apply=True).done == {(world.topic, "aircraft", "diverted"): 3}
    assert Counter(record.partition for record in world.records()) == {0: 4, 1: 2}
    world.topics.delete([world.topic])
    world.topics.create(world.topic, 1)
    redrive(world.settings, world.dead, apply=True)
    assert {record.partition for record in world.records()} == {0}
    assert len(world.records()) == 3


def test_a_look_at_letters_opens_no_producer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a producer for a look")

    flow = fleet(world.topic)
    world.send([Sent(b"poison", b"N1"), alone(Leg(tail="N1", carrier="AA", minutes=-5))])
    world.run(flow)
    monkeypatch.setattr(redriving, "AcknowledgedProducer", forbidden)
    found = redrive(world.settings, world.dead)
    assert found.done == {(world.topic, "aircraft", "diverted"): 1}
    assert found.unusable == {"not_an_envelope": 1}
    assert len(world.records()) == 2
    with pytest.raises(AssertionError, match="a producer for a look"):
        redrive(world.settings, world.dead, apply=True)

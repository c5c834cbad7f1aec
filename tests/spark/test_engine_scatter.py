"""One record as several items under several keys: folded whole or not at all, wherever the items are folded."""

from typing import Any

import pytest

from envelope import Verdict
from tests.messages import Leg
from tests.support.flows import BROKEN, Path, emitting, shared
from tests.support.world import World, alone, republished, verdicts

pytestmark = [pytest.mark.spark, pytest.mark.integration]

SOLD = ["AA", "AA+DL", "AA+DL+UA", "B6+AA", "UA", "WN+B6+DL+AA"]
LEGS: list[Any] = [Leg(tail=f"N{i % 5}", carrier=SOLD[i % len(SOLD)], minutes=1 + i) for i in range(60)]
POISON: Any = Leg(tail="N1", carrier=f"AA+DL+{BROKEN}+UA+B6", minutes=1000)


@pytest.mark.parametrize("path", ["messages", "columns"])
def test_items_of_one_record_are_folded_under_their_own_keys(world: World, path: Path) -> None:
    flow = shared(world.topic, path=path)
    world.send(republished(LEGS, [*range(40), *range(25, 60)]))
    report = world.run(flow)
    oracle = world.check(flow)
    assert verdicts(report) == verdicts(oracle.report)
    assert world.results(flow, "carrier")[b"AA"]["legs"] == sum("AA" in leg.carrier for leg in LEGS)


@pytest.mark.parametrize("path", ["messages", "columns"])
def test_a_record_with_one_item_that_fails_leaves_holes_under_all_its_keys_and_one_dead_letter(
    world: World, path: Path
) -> None:
    flow = shared(world.topic, path=path)
    world.send(alone(leg) for leg in [*LEGS[:30], POISON, *LEGS[30:]])
    report = world.run(flow)
    oracle = world.check(flow)
    [(letter, _)] = world.dead_letters()
    assert (letter.stage, letter.reason) == ("carrier", "fold_failed")
    # Of the five tasks that set it apart, one met the exception; all of them tell of it.
    assert [(letter.raised, letter.detail)] == [(dead.raised, dead.detail) for dead in oracle.dead_letters]
    assert letter.raised is not None
    assert (letter.raised.kind, letter.raised.text) == ("ValueError", BROKEN)
    assert letter.raised.at.startswith("flows.py:")
    assert report.raised == oracle.report.raised
    views = world.views(flow, "carrier")
    position = letter.offset
    holes = {key.decode() for key, view in views.items() for group in view.histories.holes.values() for _ in group}
    assert holes == set(POISON.carrier.split("+"))
    assert {at for view in views.values() for group in view.histories.holes.values() for at, *_ in group} == {position}
    assert report.reasons == {"fold_failed": 1}
    assert report.verdicts["carrier"][Verdict.REJECTED] == 5


@pytest.mark.parametrize("path", ["messages", "columns"])
def test_several_poisoned_records_of_one_batch_are_all_set_apart(world: World, path: Path) -> None:
    flow = shared(world.topic, path=path)
    second = Leg(tail="N2", carrier=f"{BROKEN}+WN", minutes=3)
    world.send(alone(leg) for leg in [POISON, *LEGS[:20], second, POISON, *LEGS[20:]])
    world.run(flow, max_records=30)
    world.check(flow)
    assert len(world.dead_letters()) == 3


def test_an_item_that_fails_in_a_stage_behind_takes_only_its_record_along(world: World) -> None:
    flow = emitting(world.topic)
    world.send(alone(leg) for leg in [*LEGS[:10], POISON, *LEGS[10:20]])
    world.run(flow)
    world.check(flow)
    [(letter, _)] = world.dead_letters()
    assert (letter.stage, letter.reason) == ("carrier", "fold_failed")
    assert world.results(flow, "aircraft")[b"N1"]["worst"] == 1000

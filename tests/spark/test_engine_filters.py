"""Filters as steps of a flow on a real broker: what the filter alone passes on is folded, or published, once."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aggregations.definition.element import Record
from envelope import Envelope, decode, encode
from envelope.filters import FilterStates
from jobs.dead_letters.redrive import redrive
from tests.seeds.test_000_sequence_filter import INCIDENTS
from tests.support.flows import ASTRAY, BARE, FILTERS, filtered
from tests.support.world import Sent, World, verdicts

pytestmark = [pytest.mark.spark, pytest.mark.integration]

HERE = ("column", "sequence by key", "event id over partitions", "session", "own class")
"""One of each way through the engine. `make kills` has the others, too; without Spark, both paths have them all."""
INCIDENT = {incident: number for number, incident in enumerate("ABC")}


def messages(kind: str) -> list[Sent]:
    """The messages of the article, an incident in a partition: ids 4 to 7 are sent again after the failure.

    For a filter over all partitions, what is sent again goes into the other partition.
    """
    found = []
    for place, (incident, number, _) in enumerate(INCIDENTS):
        astray = kind in ASTRAY and 7 <= place < 11
        payload, key = json.dumps({"id": number}).encode(), incident.encode()
        message = Envelope(payload, key=key, event_id=f"i{number}", producer="desk", sequence=number)
        value = payload if kind in BARE else encode(message)
        headers = [("sequence", str(number).encode())]
        found.append(Sent(value, key, headers, partition=(INCIDENT[incident] + astray) % 2))
    return found


def passed(kind: str, records: list[Record]) -> list[Record]:
    """What the filter alone passes on, in each partition."""
    alone = FilterStates(FILTERS["column"] if kind == "own" else FILTERS[kind])
    # The session's time is a column: the payload, as a record without an envelope has it.
    bare = kind == "session"
    return [one for one in records if alone.passes(replace(one, value=decode(one.value).payload) if bare else one)]


@pytest.mark.parametrize(
    "kind", [one if one in HERE else pytest.param(one, marks=pytest.mark.kills) for one in FILTERS]
)
def test_the_incidents_of_the_article_behind_each_filter(world: World, kind: str) -> None:
    flow, sent = filtered(world.topic, kind), messages(kind)
    world.send(sent[:9])
    world.run(flow)
    world.send(sent[9:])
    report = world.run(flow)
    wanted = Counter(one.key for one in passed(kind, world.records()))
    assert {key: state["messages"] for key, state in world.results(flow, "incident").items()} == wanted
    if kind != "window":
        assert wanted == {b"A": 4, b"B": 4, b"C": 3}
    world.check(flow)
    assert sum(report.verdicts["filter"].values()) == 6
    assert world.run(flow).records == 0


def test_a_filter_and_a_publish_step_publish_each_message_once_in_its_order(
    world: World, topic: Callable[..., str]
) -> None:
    out = topic(partitions=2, name="out")
    flow = filtered(world.topic, target=out)
    for one in range(0, 15, 5):
        world.send(messages("column")[one : one + 5])
        world.run(flow)
    wanted = [(one.partition, one.offset) for one in passed("column", world.records())]
    chains = [decode(one.value or b"").chain[-1] for one in world.records(out)]
    assert sorted((hop.partition, hop.offset) for hop in chains) == sorted(wanted)
    by_key: dict[Any, list[int]] = {}
    for one in world.records(out):
        by_key.setdefault(one.key, []).append(decode(one.value or b"").chain[-1].offset)
    assert all(offsets == sorted(offsets) for offsets in by_key.values())


def test_after_a_manifest_that_was_not_written_the_replay_is_dropped_by_positions(world: World) -> None:
    flow = filtered(world.topic)
    world.send(messages("column")[:5])
    world.run(flow)
    manifest = world.manifest(flow)
    world.send(messages("column")[5:])
    world.run(flow)
    before = world.results(flow, "incident")
    world.restore(flow, manifest)
    report = world.run(flow, accept=["store-went-back"])
    assert verdicts(report)["filter"] == {"duplicate": 10}
    assert world.results(flow, "incident") == before


def test_a_record_without_a_number_is_a_dead_letter_that_is_mended_and_passed_on_once(world: World) -> None:
    flow = filtered(world.topic)
    world.send([*messages("column")[:4], Sent(b"{}", b"A", partition=0), *messages("column")[4:]])
    report = world.run(flow)
    assert report.reasons == {"missing_field": 1}
    [(letter, _)] = world.dead_letters()
    assert (letter.stage, letter.hole) == ("filter", False)
    assert world.results(flow, "incident")[b"A"] == {"messages": 4}
    for _ in range(2):
        redrive(world.settings, world.dead, apply=True, mend=lambda _key, _value: b'{"id": 99}')
        world.run(flow)
    assert world.results(flow, "incident")[b"A"] == {"messages": 5}

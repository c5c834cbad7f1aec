"""Where a flow begins to read a topic that it has never read, on a real broker."""

import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest

from aggregations.errors import FlowError
from aggregations.run.start import Start
from persistence.protocol import FlowRef
from persistence.registry import open_store
from tests.support.flows import PATHS, Path, fleet, totals
from tests.support.world import World, alone, legs

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def ends(world: World) -> dict[int, int]:
    return {partition: one.high for (_, partition), one in world.topics.marks([world.topic]).items()}


def now() -> datetime:
    """A time between the records that are sent before and after it."""
    time.sleep(0.01)
    try:
        return datetime.now(UTC)
    finally:
        time.sleep(0.01)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", [now, lambda: "latest", None], ids=["time", "latest", "offsets"])
def test_a_new_flow_begins_where_it_is_told_and_goes_on_from_there(
    world: World, way: Callable[[], Start] | None, path: Path
) -> None:
    sent, flow = legs(120), fleet(world.topic, path)
    world.send(alone(leg) for leg in sent[:50])
    start: Start = way() if way else ends(world)
    if start == "latest":  # what is at its end when it starts
        assert world.run(flow, start=start).records == 0
    first = ends(world)
    world.send(alone(leg) for leg in sent[50:80])
    assert world.run(flow, start=start).records == 30
    world.send(alone(leg) for leg in sent[80:])
    plans: list[Any] = []
    assert world.run(flow, start="latest", planned=plans.append).records == 40, "it has begun"
    assert plans[0].start_unused
    world.check(flow, [one for one in world.records() if one.offset >= first[one.partition]])
    assert world.results(flow, "aircraft") == totals(sent[50:], "tail")
    with closing(open_store(world.stores(flow)["aircraft"])) as store:
        manifest = store.load_manifest(FlowRef(flow.name))
        assert manifest is not None
        assert manifest.starting_offsets == {world.topic: first}


def test_a_record_from_before_the_start_counts_if_it_is_sent_again(world: World) -> None:
    sent, flow = legs(20), fleet(world.topic)
    world.send(alone(leg) for leg in sent)
    world.run(flow, start="latest")
    world.send(alone(leg) for leg in sent[:5])
    world.run(flow)
    assert world.results(flow, "aircraft") == totals(sent[:5], "tail")


def test_offsets_that_the_log_does_not_have_are_refused_until_the_flow_has_begun(world: World) -> None:
    flow = fleet(world.topic)
    world.send(alone(leg) for leg in legs(20))
    with pytest.raises(FlowError, match=r"has partitions 0, 1; give all of them"):
        world.run(flow, start={0: 1})
    beyond = {partition: end + 1 for partition, end in ends(world).items()}
    with pytest.raises(FlowError, match=rf"start=0:{beyond[0]}: the log of {world.topic}:0 is 0 to {beyond[0] - 1}"):
        world.run(flow, start=beyond)
    world.run(flow)
    assert world.run(flow, start=beyond).records == 0

"""The journal of a run on Spark: every task's part of what a batch dropped."""

from collections.abc import Callable

import pytest

from persistence.commit.faults import Fault, Injector, use
from tests.support.flows import PATHS, Path, fleet
from tests.support.journals import drops_of, entries_of, of_share
from tests.support.world import World, legs, republished, verdicts

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.mark.parametrize("path", PATHS)
def test_the_entries_list_every_element_that_a_run_dropped_or_a_share_of_them(
    world: World, topic: Callable[..., str], path: Path
) -> None:
    sent, flow, journal = [leg for leg in legs(300) if leg.minutes], fleet(world.topic, path), topic(name="journal")
    world.send(republished(sent, [*range(200), *range(150, len(sent)), *range(20)]))
    report = world.run(flow, journal=journal, max_records=90)
    entries = entries_of(world, journal)
    assert [entry.batch for entry in entries] == [*range(1, report.batches + 1)]
    assert not any(entry.again for entry in entries)
    dropped = {
        (stage, verdict): {
            (batch, partition, offset)
            for batch, entry in enumerate(entries)
            for partition, (first, following) in entry.read[world.topic].items()
            for offset in range(first, following)
            if (found := entry.verdict(stage, world.topic, partition, offset)) is not None and found.value == verdict
        }
        for stage, counts in verdicts(report).items()
        for verdict in counts
    }
    assert {place: len(found) for place, found in dropped.items() if found} == {
        (stage, verdict): count
        for stage, counts in verdicts(report).items()
        for verdict, count in counts.items()
        if verdict in ("duplicate", "duplicate_in_batch", "below_floor")
    }
    ends = dict.fromkeys(range(2), 0)
    for entry in entries:
        assert {partition: first for partition, (first, _) in entry.read[world.topic].items()} == ends
        ends = {partition: following for partition, (_, following) in entry.read[world.topic].items()}
    world.check(flow)

    some = topic(name="some")
    world.run(flow, journal=some, journal_share=0.4, generation=2)
    expected = of_share(world, drops_of(entries), 0.4)
    found = {one._replace(verdict="") for one in drops_of(entries_of(world, some))}
    assert found == {one._replace(verdict="") for one in expected}
    assert 0 < len(found) < len(drops_of(entries))


def test_a_batch_that_was_tried_twice_says_so(world: World, topic: Callable[..., str]) -> None:
    flow, journal = fleet(world.topic), topic(name="journal")
    world.send(republished([leg for leg in legs(40) if leg.minutes]))
    with use(Injector([Fault.parse("manifest.error")])):
        world.run(flow, journal=journal)
    [entry] = entries_of(world, journal)
    assert not entry.again, "only the manifest was written again"

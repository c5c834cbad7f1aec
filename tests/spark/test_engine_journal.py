"""The journal of a run on Spark: every task's part of what a batch dropped."""

from collections.abc import Callable

import pytest

from aggregations.engine.journal import decode_entry
from persistence.commit.faults import Fault, Injector, use
from tests.support.flows import PATHS, Path, fleet
from tests.support.world import World, legs, republished, verdicts

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.mark.parametrize("path", PATHS)
def test_the_entries_list_every_element_that_a_run_dropped(world: World, topic: Callable[..., str], path: Path) -> None:
    sent, flow, journal = [leg for leg in legs(300) if leg.minutes], fleet(world.topic, path), topic(name="journal")
    world.send(republished(sent, [*range(200), *range(150, len(sent)), *range(20)]))
    report = world.run(flow, journal=journal, max_records=90)
    entries = [entry for record in world.records(journal) if (entry := decode_entry(record.value)) is not None]
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


def test_a_batch_that_was_tried_twice_says_so(world: World, topic: Callable[..., str]) -> None:
    flow, journal = fleet(world.topic), topic(name="journal")
    world.send(republished([leg for leg in legs(40) if leg.minutes]))
    with use(Injector([Fault.parse("manifest.error")])):
        world.run(flow, journal=journal)
    [entry] = [decode_entry(record.value) for record in world.records(journal)]
    assert entry is not None
    assert not entry.again, "only the manifest was written again"

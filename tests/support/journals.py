"""What the journal of a run lists."""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from aggregations.engine.dropped import Listed
from aggregations.engine.journal import Entry, decode_entry
from aggregations.engine.sampling import is_sampled
from envelope import Lineage, Node, decode
from tests.support.world import World


class Drop(NamedTuple):
    """An element that a stage dropped."""

    stage: str
    verdict: str
    topic: str
    partition: int
    offset: int


def entries_of(world: World, journal: str) -> list[Entry]:
    """The entries of a journal."""
    return [entry for record in world.records(journal) if (entry := decode_entry(record.value)) is not None]


def drops_of(entries: list[Entry]) -> set[Drop]:
    """Everything that the entries list."""
    return {
        Drop(stage, verdict, topic, partition, offset)
        for entry in entries
        for stage, verdicts in entry.dropped.items()
        for verdict, topics in verdicts.items()
        for topic, partitions in topics.items()
        for partition, runs in partitions.items()
        for run in Listed(runs)
        for offset in run
    }


def of_share(world: World, drops: AbstractSet[Drop], share: float) -> set[Drop]:
    """Those of some elements whose events are in a share of all, by the envelopes of their records."""
    roots = {
        (record.topic, record.partition, record.offset): Lineage.of(
            decode(record.value or b"").chain, Node(record.topic, record.partition, record.offset)
        ).root
        for record in world.records()
    }
    return {one for one in drops if is_sampled(share, roots[one.topic, one.partition, one.offset])}

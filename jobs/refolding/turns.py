"""The turns that tables and sources took in live states, from the flow's journal: which rows each lookup found.

A batch reads one table, or the sources of the main line. So a second fold finds the rows that the live one found if it
takes the same turns: up to the end of each, in batches of any size. An entry of the journal has where its batch began and
ended in every partition. Entries that are missing, because a run was killed, do no harm as long as only one part of the
flow was read in between.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

from aggregations.definition.flow import Flow
from aggregations.definition.judging import Judging
from aggregations.engine.journal import Entry, decode_entry
from envelope import TopicPartition
from jobs.explaining.log import Reader, Span
from jobs.refolding.history import History
from persistence.kafka import TopicMissing

Ends: TypeAlias = dict[TopicPartition, int]
"""Next offset by topic and partition of the flow."""


class TurnsUnknownError(Exception):
    """The journal does not show the turns; the text says why."""


def spanned(flow: Flow[Any]) -> list[str]:
    """The stages from a filter over all partitions on: which of two duplicates it passes on depends on the batches."""
    filters = [stage.index for stage in flow.stages if isinstance(fold := stage.aggregate.fold, Judging) and fold.spans]
    return [stage.name for stage in flow.stages if filters and stage.index >= filters[0]]


def recorded_turns(
    reader: Reader, journal: str | None, flow: Flow[Any], generation: int, history: History
) -> list[Ends]:
    """The ends of all turns of a history but the last, in order.

    Args:
        reader: Reads the journal.
        journal: The flow's journal; None if it has none.
        flow: The flow.
        generation: Generation of the live states.
        history: What is folded.

    Raises:
        TurnsUnknownError: The journal does not show them.
        BrokerError: Kafka does not answer, or refuses a request.
    """
    if journal is None:
        raise TurnsUnknownError("the flow has no journal (--journal)")
    try:
        log = reader.log(journal)
    except TopicMissing as error:
        raise TurnsUnknownError(str(error)) from error
    for topic in {one for part in flow.tables.values() for one in part.topics}:
        _check_whole(reader, topic, history)
    found = [
        entry
        for partition, high in log.high.items()
        for record in reader.records(Span(journal, partition, log.low[partition], high))
        if (entry := decode_entry(record.value)) is not None
        and (entry.flow, entry.generation) == (flow.name, generation)
    ]
    return turns_of(found, flow, history)


def _check_whole(reader: Reader, topic: str, history: History) -> None:
    """Check that compaction has deleted no row that a lookup may have found."""
    for partition, first in history.first[topic].items():
        end = history.end[topic][partition]
        if reader.count(Span(topic, partition, first, end)) < end - first:
            raise TurnsUnknownError(f"{topic}:{partition} lacks records, which compaction has deleted")


def turns_of(entries: Iterable[Entry], flow: Flow[Any], history: History) -> list[Ends]:
    """The same, of entries of the flow in any order. Pure.

    A flow that was restored, or began anew with empty stores, has read records again: what it read before does not count.
    Epochs may begin anew as well, so the times of the batches are in order, and their numbers only within one time.
    """
    start = {place: history.first[place.topic][place.partition] for place in history.ends(flow)}
    ends = history.ends(flow)
    cuts: list[Ends] = [start]
    for entry in sorted(entries, key=lambda one: (one.time_ms, one.epoch, one.batch)):
        begin, end = (_places(entry, which, ends) for which in (0, 1))
        while len(cuts) > 1 and any(cuts[-1][place] > at for place, at in begin.items()):
            cuts.pop()
        for places in (begin, end):
            cut = {at: min(max(places.get(at, cuts[-1][at]), cuts[-1][at]), ends[at]) for at in ends}
            if cut != cuts[-1]:
                cuts.append(cut)
    if cuts[-1] != ends:
        cuts.append(dict(ends))
    return _merged(flow, cuts)


def _places(entry: Entry, which: int, known: Mapping[TopicPartition, int]) -> Ends:
    """Where a batch began or ended, in the partitions that it knew."""
    return {
        place: its[which]
        for topic, partitions in entry.read.items()
        for partition, its in partitions.items()
        if (place := TopicPartition(topic, partition)) in known
    }


def _merged(flow: Flow[Any], cuts: list[Ends]) -> list[Ends]:
    """The cuts at which another part of the flow begins to be read."""
    turns: list[Ends] = []
    last: frozenset[str] = frozenset()
    for before, after in pairwise(cuts):
        parts = {frozenset(flow.part_of(at.topic).topics) for at, end in after.items() if end > before[at]}
        if len(parts) > 1:
            place = next(at for at, end in sorted(after.items()) if end > before[at])
            raise TurnsUnknownError(
                f"the journal lacks batches: what was read after {place.topic}:{place.partition}:{before[place]} is unknown"
            )
        if last and {last} != parts:
            turns.append(before)
        [last] = parts or [last]
    return turns

"""Finds the entry of a record's batch in a flow's journal, by bisection."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, cast

from aggregations.engine.journal import Entry, decode_entry
from aggregations.engine.sampling import ALL
from envelope import Node, Verdict
from jobs.explaining.log import Reader, Span
from jobs.explaining.outcome import InBatch
from jobs.tracing import Place
from persistence.manifest import GivenUp

_FEW: Final = 500
"""Entries that are read one after the other instead of by bisection."""


@dataclass(frozen=True, slots=True)
class Journaled:
    """What the journal says about a record.

    Attributes:
        place: Coordinates of the record.
        entry: The entry of the batch that read it.
        root: The root of its event; None if it is not known.
    """

    place: Place
    entry: Entry
    root: Node | None = None

    @property
    def batch(self) -> InBatch:
        """The batch that read the record."""
        entry = self.entry
        return InBatch(entry.batch, entry.epoch, entry.time_ms, exact=not entry.again)

    def verdict(self, stage: str) -> Verdict | None:
        """The verdict with which a stage dropped the record; None if it did not, or if it is not listed."""
        return self.entry.verdict(stage, self.place.topic, self.place.partition, self.place.offset)

    def is_whole(self, stage: str) -> bool:
        """Whether a stage that dropped the record is listed, and nothing that an earlier attempt had folded."""
        return not self.entry.again and not self.entry.unlisted.get(stage) and not self.left_out

    @property
    def left_out(self) -> str:
        """Why the entry cannot list the record: it lists a share of the events. Empty if it can."""
        if self.entry.share >= ALL or (self.root is not None and self.entry.has(self.root)):
            return ""
        share = f"the journal lists {100 * self.entry.share:g} % of the events"
        return share if self.root is None else f"{share}, and not this one"


def journaled(
    reader: Reader,
    topic: str,
    flow: tuple[str, int],
    place: Place,
    topic_id: str,
    given_up: Sequence[GivenUp] = (),
    branch: int = 0,
) -> Journaled | None:
    """The entry of the batch that read a record; None if the journal does not have it.

    Args:
        reader: Reads the journal.
        topic: The journal.
        flow: Name and generation of the flow.
        place: Coordinates of the record.
        topic_id: Current id of its topic.
        given_up: Batches that restores gave up: the flow has read their records again.
        branch: Branch of its log that the record belongs to: earlier batches read other records at its offset.
    """

    def branch_of(entry: Entry) -> int:
        return entry.branches.get(place.topic, {}).get(place.partition, 0)

    def is_after(entry: Entry) -> bool:
        """Whether an entry is that of the record, or of a later batch."""
        _, following = entry.read.get(place.topic, {}).get(place.partition, (0, 0))
        later = (branch_of(entry), following) > (branch, place.offset)
        return entry.topic_ids.get(place.topic) == topic_id and later

    def counts(entry: Entry) -> bool:
        """Whether an entry is of the flow as it is now."""
        mine = (entry.flow, entry.generation) == flow
        return mine and not any(one.has(entry.epoch, entry.batch) for one in given_up)

    log = reader.log(topic)
    for partition, high in log.high.items():
        found = _first(reader, Span(topic, partition, log.low[partition], high), counts, is_after)
        if found is None or branch_of(found) != branch:
            continue
        if found.read[place.topic][place.partition][0] <= place.offset:
            return Journaled(place, found)
    return None


def _first(
    reader: Reader, span: Span, counts: Callable[[Entry], bool], is_after: Callable[[Entry], bool]
) -> Entry | None:
    """The first entry that counts for which `is_after` is true: it is true for every later one that counts."""
    low, high, found = span.first, span.last, None
    while high - low > _FEW:
        middle = (low + high) // 2
        at, entry = _next(reader, Span(span.topic, span.partition, middle, high), counts)
        if entry is None:
            high = middle
        elif is_after(entry):
            high, found = middle, entry
        else:
            low = at + 1
    _, earlier = _next(reader, Span(span.topic, span.partition, low, high), counts, is_after)
    return earlier or found


def _next(
    reader: Reader, span: Span, counts: Callable[[Entry], bool], wanted: Callable[[Entry], bool] = lambda _: True
) -> tuple[int, Entry | None]:
    """The first entry in a range that counts and for which `wanted` is true, with its offset; None if there is none."""
    with closing(cast("Any", reader.records(span))) as records:
        for record in records:
            entry = decode_entry(record.value)
            if entry is not None and counts(entry) and wanted(entry):
                return record.offset, entry
    return span.last, None

"""What a batch of records that something else has read adds to a flow's progress. Pure.

Only positions count: neither a batch's number, nor what else its reader has noted. What lies before the flow's positions is
in and is left out. A batch that begins after them is refused before anything of it is written, unless nothing was in
between. `docs/models/Stream.tla` is the model of this rule.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from aggregations.run.risks import Risk, unsafe
from envelope import TopicPartition
from persistence.findings import Finding

DELIVERED: Final = "delivered"
"""Where a flow begins a partition that it has never read: at the first record of it that is delivered."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """The records of one partition in a batch, each offset once, in order.

    Attributes:
        place: The partition.
        first: First offset.
        end: Offset after the last one.
        records: Number of records.
        holes: Offsets without a record in between: (first, end after the last).
        contradicted: Offsets of which two records with different content were delivered.
    """

    place: TopicPartition
    first: int
    end: int
    records: int
    holes: tuple[tuple[int, int], ...] = ()
    contradicted: tuple[int, ...] = ()


SHOWN: Final = 8
"""Partitions, or offsets, that an error names."""


def joined(parts: Iterable[Delivered]) -> dict[TopicPartition, Delivered]:
    """Combine parts of partitions that follow one another; a hole may be between two parts."""
    whole: dict[TopicPartition, Delivered] = {}
    for part in sorted(parts, key=lambda one: (one.place, one.first)):
        before = whole.get(part.place)
        if before is None:
            whole[part.place] = part
            continue
        between = ((before.end, part.first),) if part.first > before.end else ()
        whole[part.place] = Delivered(
            part.place,
            before.first,
            part.end,
            before.records + part.records,
            (*before.holes, *between, *part.holes),
            (*before.contradicted, *part.contradicted),
        )
    return whole


def missing(
    delivered: Iterable[Delivered], positions: Mapping[TopicPartition, int]
) -> dict[TopicPartition, list[tuple[int, int]]]:
    """Offsets that should have been delivered, before what is new and within it: (first, end after the last), ascending.

    Args:
        delivered: The batch.
        positions: Next offset by partition; 0 for partitions that it does not name.
    """
    found: dict[TopicPartition, list[tuple[int, int]]] = {}
    for one in delivered:
        start = positions.get(one.place, 0)
        before = [(start, one.first)] if one.first > start else []
        spans = [*before, *((max(first, start), end) for first, end in one.holes if end > start)]
        if spans:
            found[one.place] = spans
    return found


def new(
    delivered: Mapping[TopicPartition, Delivered], positions: Mapping[TopicPartition, int]
) -> dict[TopicPartition, tuple[int, int]]:
    """What of a batch is not in yet: first offset and end, by partition; the rest is left out."""
    return {
        place: (start, one.end)
        for place, one in sorted(delivered.items())
        if (start := positions.get(place, 0)) < one.end
    }


def gaps(
    flow: str,
    absent: Mapping[TopicPartition, Sequence[tuple[int, int]]],
    why: Callable[[TopicPartition, Sequence[tuple[int, int]]], str],
) -> list[Finding]:
    """A finding about offsets that were not delivered, if there is something to say about one of them.

    Args:
        flow: Name of the flow.
        absent: From `missing`.
        why: Returns what is known of the records of a partition in some spans of offsets; empty if there are none.
    """
    texts = [
        f"the batch lacks {_named(spans[0])} of {place.topic}:{place.partition}, which the flow has not folded, and {known}"
        for place, spans in sorted(absent.items())
        if (known := why(place, spans))
    ]
    if not texts:
        return []
    more = f"; and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    remedy = (
        "Deliver them first: complete the archive, or start the stream at startingOffsets=earliest with a new checkpoint, or "
        "fold an archive that has them. To let a flow begin where its stream begins, use start='delivered'. Accept the risk to "
        "go on without them"
    )
    return [unsafe(Risk.GAP, f"flow {flow}: {'; '.join(texts[:SHOWN])}{more}", remedy)]


def _named(span: tuple[int, int]) -> str:
    return f"offset{'s' * (span[1] > span[0] + 1)} {spanned(span)}"


def spanned(span: tuple[int, int]) -> str:
    """A span of offsets (first, end after the last) as text."""
    first, end = span
    return f"{first} to {end - 1}" if end > first + 1 else f"{first}"


def contradictions(delivered: Iterable[Delivered], positions: Mapping[TopicPartition, int]) -> list[str]:
    """Texts about new offsets that stand for two records: those of two topics of one name, or of two clusters."""
    texts = []
    for one in delivered:
        if found := [offset for offset in one.contradicted if offset >= positions.get(one.place, 0)]:
            more = f" and at {len(found) - 1} more" if len(found) > 1 else ""
            texts.append(
                f"{one.place.topic}:{one.place.partition} has two different records at offset {found[0]}{more}"
            )
    return texts[:SHOWN]

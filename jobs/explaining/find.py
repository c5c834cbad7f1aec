"""Finds the records of a flow's sources that have an event id, or were made of a record."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

from aggregations.definition.flow import Flow
from envelope import Envelope
from jobs.explaining.copies import envelope_of
from jobs.explaining.identities import Identities
from jobs.explaining.log import Reader
from jobs.explaining.ranges import spans_of
from jobs.tracing import Place

_PART: Final = 1_000
"""Records whose ids are extracted at once."""


def find_records(
    flow: Flow[Any],
    wanted: str | Place,
    reader: Reader,
    ranges: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[Place]:
    """Find records in a range of the topics that a flow reads.

    Args:
        flow: The flow.
        wanted: An event id, of the envelope or as a filter of the flow extracts it, or the coordinates of a record that is in the chain of the records.
        reader: Reads the topics.
        ranges: See `jobs.explaining.ranges.spans_of`.
        progress: Called with the number of offsets read, and their total.

    Returns:
        Their coordinates, in order.

    Raises:
        UsageError: A range is invalid.
        BrokerError: Kafka does not answer, or refuses a request.
    """
    found, done = list[Place](), 0
    spans = spans_of(ranges, list(flow.topics), reader)
    total = sum(span.last - span.first for span in spans)
    identities = Identities(flow, {topic: reader.log(topic).topic_id for topic in flow.topics})
    for span in spans:
        enveloped, records = flow.source_of(span.topic).envelope, reader.records(span)
        while part := list(islice(records, _PART)):
            extracted = identities.of(part) if isinstance(wanted, str) else {}
            for record in part:
                place = Place(record.topic, record.partition, record.offset)
                envelope = envelope_of(record.value, enveloped=enveloped)
                if wanted in extracted.get(place, ()) or (envelope is not None and _is_of(envelope, wanted)):
                    found.append(place)
            if progress is not None:
                progress(done + part[-1].offset + 1 - span.first, total)
        done += span.last - span.first
    return found


def _is_of(envelope: Envelope, wanted: str | Place) -> bool:
    if isinstance(wanted, str):
        return envelope.event_id == wanted
    return any(Place(hop.topic, hop.partition, hop.offset) == wanted for hop in envelope.chain)

"""Finds the records of a flow's sources that have an event id, or were made of a record."""

from collections.abc import Callable, Sequence
from typing import Any

from aggregations.definition.flow import Flow
from jobs.explaining.copies import envelope_of
from jobs.explaining.log import Reader
from jobs.explaining.ranges import spans_of
from jobs.tracing import Place


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
        wanted: An event id, or the coordinates of a record that is in the chain of the records.
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
    for span in spans:
        enveloped = flow.source_of(span.topic).envelope
        for record in reader.records(span):
            envelope = envelope_of(record.value, enveloped=enveloped)
            if envelope is not None and (
                envelope.event_id == wanted
                if isinstance(wanted, str)
                else any(Place(hop.topic, hop.partition, hop.offset) == wanted for hop in envelope.chain)
            ):
                found.append(Place(record.topic, record.partition, record.offset))
            if progress is not None:
                progress(done + record.offset + 1 - span.first, total)
        done += span.last - span.first
    return found

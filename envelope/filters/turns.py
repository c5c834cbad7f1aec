"""The order in which a filter over all partitions judges the records of a batch."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from envelope.errors import EnvelopeError
from envelope.filters.arrival import INT64, Extractor, time_of


def time_extractor(rule: object) -> Extractor | None:
    """What extracts the time by which a filter judges; None for the record's timestamp."""
    found = getattr(rule, "time", None)
    return found if callable(found) else None


def in_turns(records: Sequence[Any], time: Extractor | None = None) -> list[int]:
    """The numbers of records of several partitions in the order of time, those of one partition in the given order.

    A batch has one partition after the other. A filter whose states hold ids of all partitions would see the time jump
    ahead with each of them, and forget ids that the next partition repeats. So the partition whose time is lowest is
    judged next, as Kafka Streams reads its input.

    Args:
        records: The records; those of one partition in the order of offsets.
        time: Extracts the time by which the filter judges; None for the record's timestamp. A record without a valid
            time, which the filter rejects, follows the one before it in its partition.
    """
    reached: dict[tuple[str, int], int] = {}
    turns = []
    for number, one in enumerate(records):
        place = one.topic, one.partition
        now = reached.get(place, -INT64)
        with suppress(EnvelopeError):
            now = max(now, time_of(time, one))
        reached[place] = now
        turns.append((now, place, number))
    return [number for *_, number in sorted(turns)]

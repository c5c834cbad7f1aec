"""Asks the broker whether a partition holds records at offsets that were not delivered."""

from collections.abc import Callable, Sequence

import numpy as np

from aggregations.columns.arrays import numbers
from aggregations.engine.fetch import Fetcher
from aggregations.engine.ranges import Range
from envelope import TopicPartition
from persistence.kafka import KafkaSettings, Topics


def holds_records(
    settings: KafkaSettings,
    topics: Topics,
    place: TopicPartition,
    spans: Sequence[tuple[int, int]],
    stopped: Callable[[], bool] = lambda: False,
) -> bool | None:
    """Whether a partition holds a record that a reader of committed transactions gets in one of some spans of offsets.

    It reads from the beginning of the first span up to the first such record, or to the end of the last span.

    Args:
        settings: Settings of the Kafka cluster.
        topics: Administrative access to its topics.
        place: The partition.
        spans: Offsets: (first, end after the last), ascending.
        stopped: Returns whether to stop waiting for the broker.

    Returns:
        None if the broker cannot say: it does not have these offsets, or no longer.

    Raises:
        BrokerError: The broker does not answer.
        StoppedError: The wait was stopped.
    """
    first, end = spans[0][0], spans[-1][1]
    marks = topics.marks([place.topic]).get(place)
    if marks is None or not marks.low <= first <= end <= marks.high:
        return None
    begins, ends = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    fetcher = Fetcher(settings, place.topic, "headwater-probe", compiled=False)
    try:
        for table in fetcher.read([Range(place.partition, first, end, place.topic)], stays=False, stopped=stopped):
            offsets = numbers(table.column("offset").combine_chunks(), np.int64)
            inside = np.searchsorted(begins, offsets, side="right") - 1
            if (offsets < ends[inside]).any():
                return True
        return False
    finally:
        fetcher.close()

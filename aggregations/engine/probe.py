"""Asks the broker whether a partition holds records between two offsets."""

from collections.abc import Sequence

from aggregations.engine.fetch import Fetcher
from aggregations.engine.ranges import Range
from envelope import TopicPartition
from persistence.kafka import KafkaSettings, Topics


class Probe:
    """Looks into topics, with a consumer of each that stays.

    Args:
        settings: Settings of the Kafka cluster.
        topics: Administrative access to its topics.
        group: Consumer group named to the broker; it is neither joined nor committed to.
    """

    def __init__(self, settings: KafkaSettings, topics: Topics, group: str) -> None:
        self._settings, self._topics, self._group = settings, topics, group
        self._fetchers: dict[str, Fetcher] = {}

    def close(self) -> None:
        """Close the consumers."""
        for fetcher in self._fetchers.values():
            fetcher.close()

    def holds_records(self, place: TopicPartition, start: int, end: int) -> bool | None:
        """Whether a partition holds records that a reader of committed transactions gets, from `start` up to `end`.

        Returns:
            None if the broker cannot say: it does not have these offsets, or no longer.

        Raises:
            BrokerError: The broker does not answer.
        """
        marks = self._topics.marks([place.topic]).get(place)
        if marks is None or not marks.low <= start <= end <= marks.high:
            return None
        fetcher = self._fetchers.setdefault(place.topic, self._opened(place.topic))
        found: Sequence[int] = [
            table.num_rows for table in fetcher.read([Range(place.partition, start, end, place.topic)], stays=False)
        ]
        return any(found)

    def _opened(self, topic: str) -> Fetcher:
        return self._fetchers.get(topic) or Fetcher(self._settings, topic, self._group, compiled=False)

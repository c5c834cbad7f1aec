"""How a member of a consumer group is configured and gets its messages: as pointers if possible, else as objects."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from confluent_kafka import Consumer, KafkaError, TopicPartition, cimpl

from jobs.republish.partition import Consumed
from jobs.republish.place import SESSION_MS
from persistence.kafka import KafkaSettings, librdkafka
from persistence.kafka.reading import READ_AHEAD

if TYPE_CHECKING:
    from jobs.republish.pointers import Pointed

_REFRESH_MS: Final = 30_000  # longest delay until a new partition is detected; librdkafka's default is 5 minutes
_COOPERATIVE: Final = "cooperative-sticky"
_WAIT_SECONDS: Final = 0.2  # the longest that a stop waits for an idle consumer ...
_JOIN_SECONDS: Final = 0.05  # ... and that it waits to join its group


def member_config(settings: KafkaSettings, group: str, on_error: Callable[[KafkaError], None]) -> dict[str, Any]:
    """The configuration of a member of a group.

    Args:
        settings: Where Kafka is.
        group: The group.
        on_error: Called with each error of the client.
    """
    config = settings.client(
        on_error=on_error,
        partition_assignment_strategy=_COOPERATIVE,
        **READ_AHEAD,
        session_timeout_ms=SESSION_MS,
        topic_metadata_refresh_interval_ms=_REFRESH_MS,
    )
    # Exactness depends on these: settings must not change them.
    return config | {
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        # After a transaction marker or compacted records, only this event shows the end of a partition.
        "enable.partition.eof": True,
    }


def cooperates(config: Mapping[str, Any]) -> bool:
    """Whether rebalances of a member with this configuration are incremental."""
    return bool(config["partition.assignment.strategy"] == _COOPERATIVE)


class Delivery:
    """Takes the messages of a consumer.

    Args:
        consumer: The consumer; it has subscribed.
        pointers: Most messages will be read as columns: make no Python objects of them, if that is possible.
    """

    def __init__(self, consumer: Consumer, *, pointers: bool) -> None:
        self._consumer = consumer
        # The clients of a simulated broker are others.
        is_known = librdkafka.is_known() and isinstance(consumer, cimpl.Consumer)
        self._pointed = _pointed(consumer) if pointers and is_known else None

    def begin(self, parts: Iterable[TopicPartition]) -> None:
        """Prepare for partitions that are about to be assigned."""
        if self._pointed:
            for part in parts:
                self._pointed.split_off(part.topic, part.partition)

    def end(self, part: TopicPartition) -> None:
        """Forget a partition that is revoked."""
        if self._pointed:
            self._pointed.join(part.topic, part.partition)

    def take(self, most: int, gathering: Callable[[], float], *, assigned: bool) -> Sequence[Consumed]:
        """Take up to `most` messages: those available now, or within a fifth of a second. They are valid until the next call.

        Callbacks of the consumer run here, and only before messages are taken.

        Args:
            most: Maximum number of messages.
            gathering: Returns how many seconds to wait for more messages when there is one.
            assigned: The group has assigned partitions, or none of them.
        """
        if self._pointed is None:
            return _gathered(self._consumer.consume, most, gathering)
        self._pointed.give_back()
        # The consumer itself has nothing but rebalances and errors.
        found = self._consumer.consume(most, 0 if assigned else _JOIN_SECONDS)
        return cast(list[Consumed], found) or (_gathered(self._pointed.take, most, gathering) if assigned else ())

    def close(self) -> None:
        """Give all messages back. To be called before the consumer is closed."""
        if self._pointed:
            self._pointed.close()


def _pointed(consumer: Consumer) -> "Pointed":
    from jobs.republish.pointers import Pointed  # compiled code; while it is loaded, the group answers

    return Pointed(consumer)


def _gathered(take: Callable[[int, float], Any], most: int, gathering: Callable[[], float]) -> Sequence[Consumed]:
    got = take(1, _WAIT_SECONDS)
    if got and most > 1:
        got += take(most - 1, gathering())
    return cast(Sequence[Consumed], got)

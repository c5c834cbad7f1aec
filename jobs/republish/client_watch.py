"""Notices that a consumer has lost its brokers for good."""

from collections.abc import Sequence
from typing import Final

from confluent_kafka import Consumer, KafkaException

from persistence.kafka import BrokerRefused

ANSWER_SECONDS: Final = 10.0


class ClientLost(BrokerRefused):
    """A consumer has forgotten all brokers and does not find them again; see `persistence.kafka.Topics`."""


class ClientWatch:
    """Asks a consumer's own connections for its topics.

    Args:
        consumer: The consumer.
        topics: The topics it reads.
        seconds: Seconds to wait for an answer.
    """

    def __init__(self, consumer: Consumer, topics: Sequence[str], seconds: float = ANSWER_SECONDS) -> None:
        self._consumer = consumer
        self._topics = topics
        self._seconds = seconds
        self._unanswered = 0

    def check(self) -> None:
        """Check that it still knows a broker. To be called when another client has just been answered.

        Raises:
            ClientLost: It was not answered, for the second time in a row.
        """
        try:
            self._consumer.list_topics(self._topics[0], timeout=self._seconds)
        except KafkaException as error:
            self._unanswered += 1
            if self._unanswered > 1:
                what = f"the consumer of {', '.join(self._topics)} reaches no broker, but a new client does"
                raise ClientLost(what, "Start again; nothing is lost") from error
        else:
            self._unanswered = 0

"""Notices that a topic was deleted and created again while it is read."""

import math
import time
from collections.abc import Callable, Collection
from typing import Final

from confluent_kafka import TopicPartition

from jobs.republish.offsets import patiently
from jobs.republish.partition import InputPartition
from persistence.kafka import BrokerRefused, BrokerUnavailable, Topics
from persistence.kafka.facts import TopicFacts

_NEVER: Final = -math.inf


class TopicReplaced(BrokerRefused):
    """A topic that is read was deleted and created again."""


class TopicCheck:
    """Compares the ids of topics with those of the partitions that are read.

    If a topic is deleted and created again, a consumer continues silently in the new topic at its offset in the old
    topic. So the ids are asked for after records were read: ids are never reused, so if they have not changed, all
    records read belong to the topics with these ids. The answer comes while the records are transformed.

    Args:
        topics: Client that is asked.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._asked_at = _NEVER
        self._answer: Callable[[], dict[str, TopicFacts]] | None = None

    @property
    def seconds(self) -> float:
        """Seconds since it was asked; infinite if it must be asked now."""
        return time.monotonic() - self._asked_at

    def is_due(self) -> None:
        """Ask as soon as possible."""
        self._asked_at = _NEVER

    def begin(self, partitions: Collection[InputPartition]) -> None:
        """Ask for the ids of the partitions' topics."""
        self._asked_at = time.monotonic()
        names = {part.topic for part in partitions}
        self._answer = self._topics.ask(names) if names else None

    def finish(self, partitions: Collection[InputPartition]) -> dict[str, TopicFacts]:
        """Return what is known about the topics; empty if it was not asked since the last call.

        Raises:
            TopicReplaced: A topic was created again.
            BrokerError: A topic no longer exists, may not be read, or the broker does not answer.
        """
        answer, self._answer = self._answer, None
        if answer is None:
            return {}
        try:
            facts = answer()
        except BrokerUnavailable:
            facts = patiently(lambda left: self._topics.describe({part.topic for part in partitions}))
        for part in partitions:
            if facts[part.topic].topic_id != part.topic_id:
                raise TopicReplaced(
                    f"{part.topic} was created again while it was read", "Start again; nothing of it is lost"
                )
        return facts


def facts_of(topics: Topics, parts: Collection[TopicPartition]) -> dict[str, TopicFacts]:
    """Facts about the topics of partitions, from a broker that knows all of these partitions.

    Raises:
        BrokerUnavailable: It does not know one of them yet.
    """
    facts = topics.describe({part.topic for part in parts})
    for part in parts:
        if part.partition >= facts[part.topic].partitions:
            raise BrokerUnavailable(f"{part.topic}:{part.partition} is not known to all brokers yet", "Try again")
    return facts

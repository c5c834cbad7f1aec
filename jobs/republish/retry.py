"""Retry topics: a record waits there after its transform failed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from envelope.headers import Headers
from envelope.limits import check_topic
from jobs.republish.record import RETRY_ATTEMPT, RETRY_PREFIX, number_in

RETRY_DUE: Final = f"{RETRY_PREFIX}due"
RETRY_ERROR: Final = f"{RETRY_PREFIX}error"


@dataclass(frozen=True, slots=True)
class RetryTopics:
    """Retry topics in the order of use; after the last one comes the dead-letter topic.

    A record whose transform raises goes to the first topic, waits there, is retried by the same
    republisher, goes to the second topic, and so on. Each wait adds a pass-through hop to the chain, which
    does not change the record's lane and position. One topic has one delay, so its records are due in order.

    Attributes:
        delays: Topic and its delay in seconds. Each further attempt needs another topic, even with the same delay.
    """

    delays: Mapping[str, float]

    def __post_init__(self) -> None:
        for topic, seconds in self.delays.items():
            check_topic(topic)
            if seconds < 0:
                raise ValueError(f"retry topic {topic}: the delay {seconds} s is negative")

    def next(self, attempt: int) -> str | None:
        """The topic for a record whose `attempt`-th attempt failed; None when it was the last attempt."""
        topics = tuple(self.delays)
        return topics[attempt - 1] if attempt <= len(topics) else None

    def headers(self, topic: str, attempt: int, error: str, now_ms: int) -> Headers:
        """Headers of a record for `topic` after its `attempt`-th attempt failed with `error`."""
        due = now_ms + round(self.delays[topic] * 1000)
        texts = {RETRY_ATTEMPT: str(attempt + 1), RETRY_DUE: str(due), RETRY_ERROR: error}
        return [(name, text.encode()) for name, text in texts.items()]


def due_ms(headers: Headers) -> int:
    """When a record of a retry topic is due, in milliseconds since 1970; 0 without such a header."""
    return number_in(headers, RETRY_DUE)


NO_RETRIES: Final = RetryTopics({})

"""Topics that are away: deleted, or not created yet. A republisher waits for them, says so, and goes on."""

import logging
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Final

from jobs.republish.counts import Statistics
from persistence.kafka import BrokerError, BrokerRefused, BrokerUnavailable, KafkaSettings, TopicMissing, Topics
from persistence.kafka.errors import MISSING_TOPIC_REMEDY

_LOG = logging.getLogger("headwater.republish")

TOPIC_WAIT_SECONDS: Final = 300.0
"""How long a topic may be away. To delete and create it takes an operator or a deployment seconds to minutes; a name that is
misspelt ends the service while somebody still looks."""
_ASK_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 1.0
_SAY_SECONDS: Final = 60.0


class Unsafe(BrokerRefused):
    """Records could be lost by going on; the text has the risk and the flag that takes it."""


def is_absence(error: BrokerError, settings: KafkaSettings, names: Sequence[str]) -> bool:
    """Whether an error is about a topic that is away: by its kind, or because the broker says now that one is."""
    if isinstance(error, TopicMissing):
        return True
    try:
        return bool(Topics(settings, timeout=_ASK_SECONDS).missing(names))
    except BrokerError:
        return False


class Absence:
    """Waits for topics.

    Args:
        settings: Where Kafka is.
        names: Topics that have to be there.
        patience: Seconds to wait at the most; 0 for not at all, infinity for ever.
        stop: Ends the wait.
        statistics: Where the wait is shown.
        told: Called when the statistics have changed.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        names: Sequence[str],
        *,
        patience: float,
        stop: Event,
        statistics: Statistics,
        told: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._names = names
        self._patience = patience
        self._stop = stop
        self._statistics = statistics
        self._told = told

    def wait(self, error: BrokerError) -> None:
        """Return when every topic is there, or a stop was asked for.

        Args:
            error: What showed that one is away.

        Raises:
            BrokerError: It still is; at once, and as it came, when nobody is to wait.
        """
        if self._patience <= 0:
            raise error
        _LOG.warning("%s; waiting for it", error.what)
        topics, began, before = Topics(self._settings), time.monotonic(), self._statistics.waited
        said = began - _SAY_SECONDS
        while not self._stop.wait(_PAUSE_SECONDS):
            trouble = self._trouble(topics)
            if trouble is None:
                break
            now = time.monotonic()
            waited = now - began
            self._statistics.waited = before + waited
            if waited >= self._patience:
                raise type(trouble)(f"{trouble.what}; waited {waited:.0f} s", trouble.remedy) from error
            if now - said >= _SAY_SECONDS:
                said = now
                _LOG.warning("%s; waiting since %.0f s", trouble.what, waited)
                self._told()
        self._statistics.waiting, self._statistics.waited = (), before + time.monotonic() - began
        self._told()
        if not self._stop.is_set():
            _LOG.warning("all topics exist again after %.0f s; rejoining the group", time.monotonic() - began)

    def _trouble(self, topics: Topics) -> BrokerError | None:
        """What is in the way: topics that do not exist, or a broker that does not answer; None when nothing is."""
        try:
            missing = topics.missing(self._names)
        except BrokerUnavailable as error:
            return error
        self._statistics.waiting = tuple(missing)
        return TopicMissing(f"topic {', '.join(missing)} does not exist", MISSING_TOPIC_REMEDY) if missing else None

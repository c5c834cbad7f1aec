"""Missing topics: deleted, or not created yet. A republisher reports them, waits for them, and resumes."""

import logging
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Final, TypeAlias

from jobs.republish.counts import Statistics
from persistence.kafka import BrokerError, BrokerRefused, BrokerUnavailable, KafkaSettings, TopicMissing, Topics
from persistence.kafka.errors import MISSING_TOPIC_REMEDY

_LOG = logging.getLogger("headwater.republish")

TOPIC_WAIT_SECONDS: Final = 300.0
"""Seconds for which a topic may be missing. Deleting and creating it takes an operator or a deployment seconds to
minutes; a misspelt name ends the service soon enough to be noticed."""
_ASK_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 1.0
_SAY_SECONDS: Final = 60.0


Places: TypeAlias = Sequence[tuple[KafkaSettings, Sequence[str]]]
"""Topics, and where they are: one pair for each cluster."""


class Unsafe(BrokerRefused):
    """Records could be lost if the service continued; the text names the risk and the flag that accepts it."""


def is_absence(error: BrokerError, places: Places) -> bool:
    """Whether an error is caused by a missing topic: by its kind, or because the broker now reports one missing."""
    if isinstance(error, TopicMissing):
        return True
    try:
        return any(Topics(settings, timeout=_ASK_SECONDS).missing(names) for settings, names in places)
    except BrokerError:
        return False


class Absence:
    """Waits for topics.

    Args:
        places: Topics that must exist, and where.
        patience: Maximum wait in seconds; 0 for none, infinity for no limit.
        stop: Ends the wait.
        statistics: Statistics that show the wait.
        on_change: Called when the statistics have changed.
    """

    def __init__(
        self,
        places: Places,
        *,
        patience: float,
        stop: Event,
        statistics: Statistics,
        on_change: Callable[[], None],
    ) -> None:
        self._places = places
        self._patience = patience
        self._stop = stop
        self._statistics = statistics
        self._on_change = on_change

    def wait(self, error: BrokerError) -> None:
        """Return when every topic exists, or a stop was requested.

        Args:
            error: The error that showed that a topic is missing.

        Raises:
            BrokerError: A topic is still missing; with a patience of 0, `error` itself, immediately.
        """
        if self._patience <= 0:
            raise error
        _LOG.warning("%s; waiting for it", error.what)
        places = [(Topics(settings), names) for settings, names in self._places]
        began, before = time.monotonic(), self._statistics.waited
        said = began - _SAY_SECONDS
        while not self._stop.wait(_PAUSE_SECONDS):
            trouble = self._trouble(places)
            if trouble is None:
                break
            now = time.monotonic()
            waited = now - began
            self._statistics.waited = before + waited
            if waited >= self._patience:
                raise type(trouble)(f"{trouble.what}; waited {waited:.0f} s", trouble.remedy) from error
            if now - said >= _SAY_SECONDS:
                said = now
                _LOG.warning("%s; waiting for %.0f s so far", trouble.what, waited)
                self._on_change()
        self._statistics.waiting, self._statistics.waited = (), before + time.monotonic() - began
        self._on_change()
        if not self._stop.is_set():
            _LOG.warning("all topics exist after %.0f s; rejoining the group", time.monotonic() - began)

    def _trouble(self, places: Sequence[tuple[Topics, Sequence[str]]]) -> BrokerError | None:
        """The current problem: topics that do not exist, or a broker that does not answer; None without a problem."""
        try:
            missing = [name for topics, names in places for name in topics.missing(names)]
        except BrokerUnavailable as error:
            return error
        self._statistics.waiting = tuple(missing)
        if not missing:
            return None
        what = (
            f"topic {missing[0]} does not exist" if len(missing) == 1 else f"topics {', '.join(missing)} do not exist"
        )
        return TopicMissing(what, MISSING_TOPIC_REMEDY)

"""Connections and cached facts of an engine process: each is made once, on first use."""

import os
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

from aggregations.spark import residents
from aggregations.spark.fetch import Fetcher
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from persistence.protocol import StateStore
from persistence.registry import open_store

T = TypeVar("T")

_UNUSED_SECONDS = 60.0
"""Time after which a consumer is closed: its run has ended, and it would go on fetching."""
_open: dict[Hashable, object] = {}


def store_of(url: str) -> StateStore:
    """The store at `url`."""
    return _once(("store", url), lambda: open_store(url))


def producer_of(settings: KafkaSettings) -> AcknowledgedProducer:
    """The producer to a cluster."""
    return _once(("producer", _name(settings)), lambda: AcknowledgedProducer(settings))


def topics_of(settings: KafkaSettings) -> Topics:
    """Administrative access to the topics of a cluster."""
    return _once(("topics", _name(settings)), lambda: Topics(settings))


def fetcher_of(settings: KafkaSettings, topic: str, group: str, *, headers: bool) -> Fetcher:
    """The consumer of a topic."""
    return _once(
        ("fetcher", _name(settings), topic, group, headers), lambda: Fetcher(settings, topic, group, headers=headers)
    )


def max_message_bytes(settings: KafkaSettings, topic: str) -> int:
    """The largest record that a topic accepts, in bytes."""
    return _once(("size", _name(settings), topic), lambda: topics_of(settings).max_message_bytes([topic])[topic])


def _name(settings: KafkaSettings) -> Hashable:
    """All of the settings: two flows may come to one broker as two users."""
    return settings.bootstrap, tuple(sorted(settings.options.items()))


def _once(what: Hashable, make: Callable[[], T]) -> T:
    place = (os.getpid(), what)  # a fork inherits the table, but must not use its connections
    if place not in _open:
        _open[place] = make()
    return _open[place]  # type: ignore[return-value]


def _close_unused() -> bool:
    for place, found in list(_open.items()):
        if isinstance(found, Fetcher) and time.monotonic() - found.used > _UNUSED_SECONDS:
            del _open[place]
            found.close()
    return False


residents.keepers.append(_close_unused)

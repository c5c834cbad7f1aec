"""Connections and cached facts of an engine process: each is made once, on first use."""

import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from aggregations.engine.idle import keepers
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from persistence.kafka.producer import batch_bytes
from persistence.protocol import StateStore
from persistence.registry import open_store

T = TypeVar("T")

NEEDED: Final[dict[str, Any]] = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
}
"""Settings of every consumer here that a user's settings do not override: a record would be missing, or an aborted one
would be read."""
UNUSED_SECONDS: Final = 60.0
"""Time after which a resident closes a consumer, which would go on fetching, or a store: their run has ended."""
opened: Final[dict[Hashable, object]] = {}
"""What `once` made, by process and name."""
_stores_used: Final[dict[str, float]] = {}
_own: Final[ContextVar[dict[Hashable, object] | None]] = ContextVar("own clients of a run", default=None)


def store_of(url: str) -> StateStore:
    """The store at `url`."""
    store = once(("store", url), lambda: open_store(url))
    _stores_used[url] = time.monotonic()
    return store


def producer_of(settings: KafkaSettings, largest: Iterable[int] = ()) -> AcknowledgedProducer:
    """The producer to topics of a cluster.

    Args:
        settings: Settings of the Kafka cluster.
        largest: Largest record that each topic takes, in bytes.
    """
    size = batch_bytes(largest)
    return once(("producer", name_of(settings), size), lambda: AcknowledgedProducer(settings, batch_size=size))


def topics_of(settings: KafkaSettings) -> Topics:
    """Administrative access to the topics of a cluster."""
    return once(("topics", name_of(settings)), lambda: Topics(settings))


def max_message_bytes(settings: KafkaSettings, topic: str) -> int:
    """The largest record that a topic accepts, in bytes."""
    return once(("size", name_of(settings), topic), lambda: topics_of(settings).max_message_bytes([topic])[topic])


def name_of(settings: KafkaSettings) -> Hashable:
    """All of the settings: two flows may come to one broker as two users."""
    return settings.bootstrap, tuple(sorted(settings.options.items()))


def once(what: Hashable, make: Callable[[], T]) -> T:
    """What `make` returned in this process, or in `own_clients`, for the first call with this name."""
    own = _own.get()
    # A fork inherits the table, but must not use its connections.
    table, place = (opened, (os.getpid(), what)) if own is None else (own, what)
    if place not in table:
        table[place] = make()
    return table[place]  # type: ignore[return-value]


@contextmanager
def own_clients(settings: KafkaSettings, topics: Topics, stores: Mapping[str, StateStore]) -> Iterator[None]:
    """Give this thread clients of its own while the block runs; they are closed after it.

    Args:
        settings: Settings of the Kafka cluster.
        topics: Administrative access to its topics, for `topics_of`.
        stores: Open stores by URL, for `store_of`. They stay open.
    """
    own = of_own(settings, topics, stores)
    before = _own.set(own)
    try:
        yield
    finally:
        _own.reset(before)
        close_own(own)


OwnClients = dict[Hashable, object]
"""What `once` made for one run."""


def of_own(settings: KafkaSettings, topics: Topics, stores: Mapping[str, StateStore]) -> OwnClients:
    """Clients for one run; see `own_clients`."""
    own: OwnClients = {("store", url): store for url, store in stores.items()}
    own["topics", name_of(settings)] = topics
    return own


def use_own(own: OwnClients) -> None:
    """Use these clients in the current context, until the context ends."""
    _own.set(own)


def close_own(own: OwnClients) -> None:
    """Close what they have opened."""
    for client in own.values():
        if isinstance(client, AcknowledgedProducer):
            client.close()


def _close_unused() -> bool:
    now = time.monotonic()
    for url, used in list(_stores_used.items()):
        if now - used > UNUSED_SECONDS:
            del _stores_used[url]
            store: StateStore = opened.pop((os.getpid(), ("store", url)))  # type: ignore[assignment]
            store.close()
    return False


keepers.append(_close_unused)

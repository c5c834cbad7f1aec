"""One life of a simulated republisher, and what its clients deliver."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from confluent_kafka import KafkaError

from aggregations.definition.element import Record
from envelope.headers import Headers
from tests.simulation.kafka import Cluster

Place = tuple[str, int]
"""Topic and partition."""

_CREATE_TIME = 1


class Sent(NamedTuple):
    """A record in a producer's queue."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(slots=True)
class Life:
    """One life of a service: its broker, and how much it may read. Replaces `KafkaSettings`.

    Attributes:
        cluster: The broker.
        deliver: Appends a record to its topic.
        allowed: Number of records that it may still read, by partition.
        idle: Number of unsuccessful polls, while a record waits for a retry, after which it is stopped.
        revoked: Number of polls after which some partitions go to another member, and come back; negative for never.
        reorders: Its producer may swap neighbours.
        place: Its place in its group.
        places: Number of places among which the group's partitions are divided. It is one if the service is alone; all
            other members then count as gone.
        options: Further settings of `KafkaSettings`.
        stop: Stops the service.
        pause: Called once if there is nothing to read; returns when it should poll again.
    """

    cluster: Cluster
    deliver: Callable[[Sent], None]
    allowed: dict[Place, int]
    idle: int = 0
    revoked: int = -1
    reorders: bool = False
    place: int = 0
    places: int = 1
    options: Mapping[str, str] = field(default_factory=dict)
    stop: Callable[[], None] = lambda: None
    pause: Callable[[], None] | None = None

    def client(self, on_error: object = None, **options: Any) -> dict[str, Any]:
        """The configuration of a client."""
        return {"life": self, **{name.replace("_", "."): value for name, value in options.items()}, **self.options}


class SimulatedMessage:
    """A record as a consumer delivers it."""

    __slots__ = ("_epoch", "_record")

    def __init__(self, record: Record, epoch: int = 0) -> None:
        self._record = record
        self._epoch = epoch

    def error(self) -> KafkaError | None:
        return None

    def topic(self) -> str:
        return self._record.topic

    def partition(self) -> int:
        return self._record.partition

    def offset(self) -> int:
        return self._record.offset

    def key(self) -> bytes | None:
        return self._record.key

    def value(self) -> bytes | None:
        return self._record.value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return list(self._record.headers) or None

    def timestamp(self) -> tuple[int, int]:
        return _CREATE_TIME, self._record.timestamp_ms

    def leader_epoch(self) -> int:
        return self._epoch

    def __len__(self) -> int:
        return len(self._record.value or b"")


class SimulatedReport(SimulatedMessage):
    """A client's event other than a record: an error, the end of a partition, an undelivered record."""

    __slots__ = ("_error",)

    def __init__(self, code: int, topic: str = "", partition: int = 0, offset: int = 0) -> None:
        super().__init__(Record(topic, partition, offset, None, None))
        self._error = KafkaError(code)

    def error(self) -> KafkaError:
        return self._error


def demand(config: Mapping[str, Any], wanted: Mapping[str, object]) -> None:
    """Refuse a configuration with other values of these settings: exactness depends on them.

    A real broker behaves differently with others; this one ignores them.
    """
    if wrong := [name for name, value in wanted.items() if config.get(name) != value]:
        raise ValueError(f"{', '.join(wrong)}: exactness rests on another value")

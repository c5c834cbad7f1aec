"""A record as Kafka delivers it, and the element that a flow makes from it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from envelope import Hop, Lineage, Node, Route
from envelope.filters.producers import Stamp

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Record:
    """A record as Kafka delivers it.

    Attributes:
        topic: Topic.
        partition: Partition.
        offset: Offset.
        key: Key bytes, or None.
        value: Value bytes, or None.
        timestamp_ms: Kafka's timestamp in milliseconds since 1970.
        headers: Pairs of name and value, in order; names may repeat. A name that is not UTF-8 is U+FFFD.
        topic_id: Kafka's id of the topic; empty when unknown.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int = 0
    headers: tuple[tuple[str, bytes | None], ...] = ()
    topic_id: str = ""

    @property
    def node(self) -> Node:
        """The record's coordinates."""
        return Node(self.topic, self.partition, self.offset, self.topic_id)


@dataclass(frozen=True, slots=True)
class Element(Generic[T]):
    """One event on its way through a flow, with its origin.

    A function that decides, such as a predicate or a key, must return the same for each delivery of an event. So it must
    not use `own`, `partition`, `offset`, `timestamp_ms`, hops of `chain` after the first one, or headers that
    another delivery may not have; see `aggregations.definition.stability`.

    Attributes:
        value: Result of the previous steps; at the source a mapping of column names to values, None for a tombstone.
        key: The record's key.
        own: The record's coordinates.
        chain: Hops of the envelope, the first republisher's input first; empty without an envelope.
        event_time_us: Event time, or else the timestamp of the root, or else of the record, in microseconds since 1970.
        event_id: Identity of the event; empty when it has none.
        headers: The record's headers.
        indices: Its index in the output of each flat-map of this flow that it went through.
        branch: Names of the branches of this flow that it went through.
        again: It may be a copy: nothing proves that its record is the first delivery of its event.
        route: Route that the previous stage gives it: `MISSING` or `RETRIED` after a late fold, because of a dead
            letter; `PLAIN` otherwise.
        timestamp_ms: Kafka's timestamp of the record, in milliseconds since 1970.
        time_us: The event time that decides its windows, in microseconds since 1970: the same in every delivery of its
            event. None if it has no valid one, or if the flow has no windows.
        before_us: The latest event time in the log of its partition before its record; None if there is none.
        stamp: What its envelope says about its producer: name, session and sequence number. None without a number, and
            in a flow without a filter that reads it.
    """

    value: T
    key: bytes | None
    own: Node
    chain: tuple[Hop, ...] = ()
    event_time_us: int = 0
    event_id: str = ""
    headers: tuple[tuple[str, bytes | None], ...] = ()
    indices: tuple[int, ...] = ()
    branch: tuple[str, ...] = ()
    again: bool = False
    route: Route = Route.PLAIN
    timestamp_ms: int = 0
    time_us: int | None = None
    before_us: int | None = None
    stamp: Stamp | None = None

    @property
    def topic(self) -> str:
        """Topic of the record."""
        return self.own.topic

    @property
    def partition(self) -> int:
        """Partition of the record."""
        return self.own.partition

    @property
    def offset(self) -> int:
        """Offset of the record."""
        return self.own.offset

    @property
    def chained(self) -> bool:
        """Whether its record was republished; one that was only redriven was not."""
        return any(not hop.pass_through for hop in self.chain)

    @property
    def lineage(self) -> Lineage:
        """The chain and, last, the record's own coordinates."""
        return Lineage.of(self.chain, self.own)

    @property
    def root(self) -> Node:
        """The record that caused the event."""
        return self.lineage.root

    def __getitem__(self, column: str) -> Any:
        """The value of a column, if the element's value is a mapping.

        Raises:
            KeyError: The value is not a mapping, or has no such column.
        """
        value: Any = self.value
        if not isinstance(value, Mapping):
            raise KeyError(f"the element's value is not a mapping, so it has no column {column!r}")
        return value[column]

    def of(self, value: U) -> "Element[U]":
        """The element with another value and the same lineage: what `map` returns."""
        return replace(self, value=value)  # type: ignore[arg-type,return-value]

    def nth(self, index: int, value: U) -> "Element[U]":
        """The `index`-th output of a flat-map of this element."""
        return replace(self, value=value, indices=(*self.indices, index))  # type: ignore[arg-type,return-value]

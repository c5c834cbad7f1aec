"""The source of a flow: a topic, the form of its records, and how one record is read.

`RecordDecoder` reads record by record and is the reference; `aggregations.columns.Decoder` reads whole
batches with the same result.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import msgspec
import polars as pl

from aggregations.definition.arguments import check_type, located, topic_name
from aggregations.definition.element import Element, Record
from aggregations.definition.expressions import (
    Expression,
    check_column,
    columns_of,
    describe_expression,
    parsed,
    text_of,
)
from aggregations.definition.payloads import Json, Payload, Protobuf, Raw, payload_of
from aggregations.definition.schemas import types_of
from aggregations.definition.stability import checked_stable
from aggregations.definition.system import SYSTEM_COLUMNS
from aggregations.definition.windows import duration
from aggregations.errors import FlowError
from envelope import Envelope, EnvelopeError, Hop, Limits, Lineage, Node, Reason, Siblings, Tombstones, decode
from envelope.codec import redriven_payload
from envelope.dedup.retries import Retries
from envelope.filters.producers import Stamp, stamp_of
from envelope.limits import DEFAULT_LIMITS
from envelope.times import micros_of

__all__ = ["Decoded", "Json", "Raw", "RecordDecoder", "Topic"]

AHEAD: Final = 3_600
"""Seconds: the default of `ahead=`, as Kafka 4's of `message.timestamp.after.max.ms`."""


@dataclass(frozen=True, init=False)
class Topic:
    """A Kafka topic as a source. Immutable, picklable, equal by content.

    Args:
        name: Name of the topic.
        payload: A protobuf message class, `Json({"column": pl.Int64, ...})` or `Raw()`.
        envelope: The payload is inside an envelope. Otherwise the record's value is the payload and its
            lineage is its own coordinates. Redriven records of such a topic arrive in an envelope, and are recognised by its last hop.
        siblings: What to do with messages of one root that no fan-out index tells apart.
        limits: Limits of the envelopes and payloads that are accepted.
        cluster: Name of the Kafka cluster, when there is more than one.
        tombstones: What to do with records that have no value. With `element` the flow gets them, with None as value.
        time: Column, or expression over the payload's columns, that gives the event time as an integer, in milliseconds
            since 1970. By default it is the envelope's event time, or else the timestamp of the event's first record.
        ahead: How far an event time may be ahead of its record's timestamp; beyond that it is invalid.
        idle: How long a partition that is read to its end has had no record before windows close without it, such as
            `10m` of real time; None if they never do.
        skew: How far in event time its partitions may be read ahead of others that have more to read than one batch takes,
            such as `10m`; None for any distance. It determines only the order of reading.
        stable: Those of the columns `_partition`, `_offset`, `_timestamp`, `_headers` and `_chain` that are the same in
            every delivery of an event to this topic, so that they may decide: see `aggregations.definition.stability`.
            For example `_headers`, if whoever sends an event again sends the same headers.
        retries: Names or patterns of retry topics, by the topic whose records they repeat, such as
            `{"orders": "orders-retry-*"}`. Hops among them count as pass-through hops, also if the sender did not mark
            them.
        ahead_seconds: `ahead` in seconds.
        idle_seconds: `idle` in seconds.
        skew_seconds: `skew` in seconds.

    Raises:
        FlowError: An argument is invalid, or a column's name begins with an underscore, as the engine's own do.
    """

    name: str
    payload: Payload
    envelope: bool
    siblings: Siblings
    limits: Limits
    cluster: str
    tombstones: Tombstones
    time: Expression | None = field(compare=False)
    ahead: str = field(compare=False)
    ahead_seconds: int = field(init=False, repr=False)
    _time_text: str = field(init=False, repr=False)
    idle: str | None = field(compare=False)
    idle_seconds: int | None = field(init=False, repr=False)
    skew: str | None = field(compare=False)
    skew_seconds: int | None = field(init=False, repr=False)
    stable: tuple[str, ...]
    retries: Retries

    def __init__(
        self,
        name: str,
        payload: Any = None,
        *,
        envelope: bool = True,
        siblings: Siblings = Siblings.EVENT_ID,
        limits: Limits = DEFAULT_LIMITS,
        cluster: str = "",
        tombstones: Tombstones = Tombstones.SKIP,
        time: Expression | None = None,
        ahead: str = "1h",
        idle: str | None = None,
        skew: str | None = None,
        stable: Collection[str] = (),
        retries: Mapping[str, str | Sequence[str]] | None = None,
    ) -> None:
        check_type("Topic(): limits=", limits, Limits, "envelope.Limits(...)")
        topic = topic_name(name, limits)
        with located(f"topic {topic}"):
            kind = Raw() if payload is None else payload_of(payload)
            if reserved := sorted(column for column in kind.schema if column.startswith("_")):
                raise FlowError(f"column names that begin with _ are reserved; rename {', '.join(reserved)}")
            check_type("envelope=", envelope, bool, "True or False")
            check_type("cluster=", cluster, str, "text")
            policies = (_member("siblings=", Siblings, siblings), limits, cluster)
            if time is not None:
                _check_time(time, kind.schema)
            # The time as text, too: two expressions cannot be compared.
            text = "" if time is None else describe_expression(time)
            values = (
                *(topic, kind, envelope, *policies, _member("tombstones=", Tombstones, tombstones)),
                *(time, ahead, duration("ahead=", ahead, least=0), text),
                *(idle, None if idle is None else duration("idle=", idle)),
                *(skew, None if skew is None else duration("skew=", skew), checked_stable(stable), _retries(retries)),
            )
        for name_of_field, value in zip(self.__dataclass_fields__, values, strict=True):
            object.__setattr__(self, name_of_field, value)

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """Column name to polars type."""
        return self.payload.schema

    @property
    def time_columns(self) -> frozenset[str]:
        """Columns from which the event time is read."""
        return frozenset() if self.time is None else columns_of([parsed(self.time)])

    @property
    def definition(self) -> str:
        """Canonical text of the settings that decide the lanes and positions of its elements, and which are folded.

        Part of the definition of every stage that reads the topic. The payload is not part of it: columns may be added.
        """
        kind = "envelope" if self.envelope else "bare"
        more = ["tombstones"] if self.tombstones is Tombstones.ELEMENT else []
        if self._time_text:
            more += ["time", self._time_text]
        if self.ahead_seconds != AHEAD:
            more += ["ahead", str(self.ahead_seconds)]
        more += [part for topic, names in self.retries.topics for part in ("retries", topic, *names)]
        return msgspec.json.encode(["source", self.cluster, self.name, kind, self.siblings.value, *more]).decode()


def check_source(topic: object) -> None:
    """Check the argument of `Flow.source`.

    Raises:
        FlowError: It is not a topic.
    """
    check_type("source()", topic, Topic, 'a Topic, such as Topic("orders", Order)')


def _check_time(time: Expression, schema: dict[str, pl.DataType]) -> None:
    """Check that an expression over the payload's columns gives integers."""
    check_column("time=", time)
    if others := sorted(columns_of([parsed(time)]) & SYSTEM_COLUMNS.keys()):
        raise FlowError(
            f"time= reads {', '.join(others)}; it takes the payload's columns, as those of a record may differ between two "
            "deliveries of an event"
        )
    dtype = types_of({"": parsed(time)}, schema)[""]
    if not dtype.is_integer():
        raise FlowError(
            f"time= takes an integer in milliseconds since 1970; {text_of(time)} is of type {dtype}. A text or a time "
            'becomes one with .str.to_datetime() and .dt.timestamp("ms")'
        )


def _member(what: str, kind: type[StrEnum], given: str) -> StrEnum:
    """A member of an enumeration, given as such or by its value."""
    try:
        return kind(given)
    except ValueError as error:
        raise FlowError(f"{what} takes one of {', '.join(kind)}; got {given!r}") from error


def _retries(given: object) -> Retries:
    try:
        return Retries.of(given)
    except ValueError as error:
        raise FlowError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Decoded:
    """One record, read and checked.

    Attributes:
        columns: Column name to value; None for a tombstone.
        lineage: Its lineage, without a loop. Topic ids are those of the chain.
        chain: The hops of its envelope.
        key: The record's key.
        event_id: Identity of the event; empty when it has none.
        event_time_us: `time_us`, or else the record's timestamp, in microseconds since 1970.
        identity: Event id for `Lineage.standing`: empty unless the source's policy uses event ids.
        time_us: The event time that is the same in every delivery: the envelope's, or else the timestamp of the root;
            None if neither is known.
        stamp: What the envelope says about its producer, if that is read.
    """

    columns: dict[str, object] | None
    lineage: Lineage
    chain: tuple[Hop, ...]
    key: bytes | None
    event_id: str
    event_time_us: int
    identity: str
    time_us: int | None
    stamp: Stamp | None = None

    def element(self, record: Record, *, again: bool = False) -> Element[dict[str, object] | None]:
        """The element that enters the flow from this record; `again` when it may be a copy."""
        return Element(
            value=self.columns,
            key=self.key,
            own=self.lineage.own,
            chain=self.chain,
            event_time_us=self.event_time_us,
            event_id=self.event_id,
            headers=record.headers,
            again=again,
            timestamp_ms=record.timestamp_ms,
            stamp=self.stamp,
        )


class RecordDecoder:
    """Reads the records of one topic one by one.

    Args:
        topic: The source.
        columns: The columns needed; None for all. Both runners of a flow must pass the same columns: a field that no
            column needs is not read, so an invalid value in it is not detected.
        stamps: Read what envelopes say about their producers, too.
    """

    def __init__(self, topic: Topic, columns: frozenset[str] | None = None, *, stamps: bool = False) -> None:
        self.topic = topic
        self._stamps = stamps
        self._read = topic.payload.reader(columns)
        self._payload_type = topic.payload.type.full_name if isinstance(topic.payload, Protobuf) else ""

    def skips(self, record: Record) -> bool:
        """Whether the record is a tombstone that is not passed to the flow."""
        return record.value is None and self.topic.tombstones is Tombstones.SKIP

    def decode(self, record: Record) -> Decoded:
        """Read and check one record that `skips` does not exclude.

        Raises:
            EnvelopeError: With the reason code of the first rule that is broken.
        """
        if record.value is None and self.topic.tombstones is Tombstones.ELEMENT:
            return self._plain(record, None)
        if self.topic.envelope:
            return self._enveloped(record, decode(record.value, self.topic.limits))
        message = redriven_payload(record.value, self.topic.limits)
        return self._bare(record) if message is None else self._enveloped(record, message)

    def _enveloped(self, record: Record, message: Envelope) -> Decoded:
        if message.key is not None and message.key != record.key:
            raise EnvelopeError(Reason.KEY_MISMATCH, f"{record.node}: the envelope was written with another key")
        if message.destination and message.destination != record.topic:
            raise EnvelopeError(Reason.WRONG_DESTINATION, f"{record.node}: the envelope was written for another topic")
        if self._payload_type and message.payload_type and message.payload_type != self._payload_type:
            raise EnvelopeError(
                Reason.UNKNOWN_PAYLOAD_TYPE,
                f"{record.node}: the payload is not a {self._payload_type}; declare its type",
            )
        chain = self.topic.retries.marked(message.chain, record.topic)
        lineage = Lineage.of(chain, self._own(record)).check()
        time_us = _time_us(message, record)
        try:
            columns = self._read(message.payload)
        except EnvelopeError as error:
            error.chain = chain
            raise
        return Decoded(
            columns=columns,
            lineage=lineage,
            chain=chain,
            key=record.key,
            event_id=message.event_id,
            event_time_us=micros_of(record.timestamp_ms) if time_us is None else time_us,
            identity=message.event_id if self.topic.siblings is Siblings.EVENT_ID else "",
            time_us=time_us,
            stamp=stamp_of(message) if self._stamps else None,
        )

    def _bare(self, record: Record) -> Decoded:
        payload, limit = record.value, self.topic.limits.payload_bytes
        if not payload:
            raise EnvelopeError(Reason.EMPTY, f"{record.node}: the record has no value")
        if len(payload) > limit:
            raise EnvelopeError(
                Reason.PAYLOAD_TOO_LARGE, f"{record.node}: the payload has {len(payload)} bytes; the limit is {limit}"
            )
        try:
            columns = self._read(payload)
        except EnvelopeError as error:
            error.chain = ()
            raise
        return self._plain(record, columns)

    def _plain(self, record: Record, columns: dict[str, object] | None) -> Decoded:
        """Decode a record without an envelope: it is its own root."""
        return Decoded(
            columns=columns,
            lineage=Lineage((self._own(record),)),
            chain=(),
            key=record.key,
            event_id="",
            event_time_us=micros_of(record.timestamp_ms),
            identity="",
            time_us=_root_time(record.timestamp_ms),
        )

    def _own(self, record: Record) -> Node:
        return replace(record.node, cluster=self.topic.cluster)


def _time_us(message: Envelope, record: Record) -> int | None:
    if message.event_time_us is not None:
        return message.event_time_us
    return _root_time(message.chain[0].timestamp_ms if message.chain else record.timestamp_ms)


def _root_time(timestamp_ms: int | None) -> int | None:
    """The timestamp of a root as event time; None if the root has none, which Kafka shows as -1."""
    return None if timestamp_ms is None or timestamp_ms < 0 else micros_of(timestamp_ms)

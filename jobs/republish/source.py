"""Input of a republisher: its topics, their wrapping, and their payload."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
from google.protobuf.message import DecodeError, Message

from envelope import EnvelopeError, Limits, Reason, Tombstones
from envelope import envelope_pb2 as pb
from envelope.codec import from_message, parse, redriven_payload, rewrite
from envelope.dedup.retries import NO_RETRIES, Retries
from envelope.event_ids import EventIds, coordinates_of
from envelope.framing import SCHEMA_ID_FRAME, indexes_of, strip_frame
from envelope.headers import TRACEPARENT, Headers, from_cloudevents
from envelope.limits import DEFAULT_LIMITS, check_topic
from envelope.message import FORMAT
from envelope.times import micros_of
from jobs.republish.record import InputRecord

PayloadParser: TypeAlias = Callable[[bytes], Any]


class Wrapping(StrEnum):
    """How the payload of a record is wrapped."""

    ENVELOPE = "envelope"
    """In a headwater envelope, which is forwarded with one more hop."""
    NONE = "none"
    """Not at all: the value is the payload, and the record is the root of its event."""
    CLOUDEVENTS = "cloudevents"
    """As a CloudEvent in binary mode: the context is in headers, and the record is the root of its event."""


class JsonPayload:
    """Declares a JSON payload; `InputRecord.data` is the parsed JSON."""


@dataclass(frozen=True, slots=True)
class InputTopics:
    """The topics that a republisher reads, and how it reads them.

    Attributes:
        topics: Their names.
        wrapping: How the payload is wrapped.
        payload: `JsonPayload`, a protobuf message class, or None for bytes that only the transform interprets. A
            payload that does not match the declaration goes to the dead-letter topic.
        tombstones: What to do with records that have no value: skip them, or dead-letter them as `empty`. They cannot
            be forwarded, because they have no value to which a hop could be appended.
        event_id: How records without an envelope get an event id: `coordinates`, `field:NAME`, `hash:NAME,NAME`, or
            `EventIds`; None for no id. Fields need a declared payload. If a transform makes several outputs, it gives
            each its own id: `OutputRecord(event_id=...)`.
        retries: Names or patterns of retry topics, as in `aggregations.Topic`. Hops among them are no loop.

    Raises:
        EnvelopeError: Kafka would not allow a topic's name.
        ValueError: There is no topic, the policy for tombstones or `retries` is invalid, or an event id cannot be made.
    """

    topics: Sequence[str]
    wrapping: Wrapping = Wrapping.ENVELOPE
    payload: type[JsonPayload] | type[Message] | None = None
    tombstones: Tombstones = Tombstones.SKIP
    event_id: EventIds | str | None = None
    retries: Retries | Mapping[str, str | Sequence[str]] = NO_RETRIES

    def __post_init__(self) -> None:
        object.__setattr__(self, "retries", Retries.of(self.retries))
        if isinstance(self.topics, str):
            object.__setattr__(self, "topics", (self.topics,))
        object.__setattr__(self, "topics", tuple(check_topic(topic) for topic in self.topics))
        object.__setattr__(self, "wrapping", Wrapping(self.wrapping))
        object.__setattr__(self, "tombstones", Tombstones(self.tombstones))
        if self.tombstones is Tombstones.ELEMENT:
            raise ValueError("a republisher cannot pass tombstones on: skip or dead_letter")
        if not self.topics:
            raise ValueError("a source needs a topic")
        if isinstance(self.event_id, str):
            object.__setattr__(self, "event_id", EventIds.parse(self.event_id))
        if self.event_id and self.wrapping is not Wrapping.NONE:
            raise ValueError(
                "an event id is made for records without an envelope (raw or json); the others bring theirs"
            )
        if isinstance(self.event_id, EventIds) and self.event_id.names and self.payload is None:
            raise ValueError("an event id is made of fields: declare the payload (--input json)")

    @classmethod
    def of(
        cls,
        topics: str | tuple[str, ...],
        kind: str,
        tombstones: str | Tombstones = Tombstones.SKIP,
        event_id: str | None = None,
    ) -> "InputTopics":
        """Return the source for command-line arguments: `envelope`, `raw`, `json` or `cloudevents`, and a policy.

        Raises:
            ValueError: `kind`, the policy or the event id is not one of these.
        """
        try:
            policy = Tombstones(tombstones)
        except ValueError as error:
            raise ValueError(f"unknown policy for tombstones {tombstones!r}: write skip or dead_letter") from error
        names = (topics,) if isinstance(topics, str) else topics
        match kind:
            case "envelope":
                return cls(names, tombstones=policy, event_id=event_id)
            case "raw":
                return cls(names, Wrapping.NONE, tombstones=policy, event_id=event_id)
            case "json":
                return cls(names, Wrapping.NONE, JsonPayload, policy, event_id)
            case "cloudevents":
                return cls(names, Wrapping.CLOUDEVENTS, tombstones=policy, event_id=event_id)
        raise ValueError(f"unknown input format {kind!r}: write envelope, raw, json or cloudevents")


class ValueOpener:
    """Parses the values of one topic.

    Args:
        source: Their wrapping and payload.
        limits: Limits of the envelopes and payloads that are accepted.
    """

    def __init__(self, source: InputTopics, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._parse = _parser(source.payload)
        self._type = ""
        self._indexes: tuple[int, ...] = (0,)
        if isinstance(source.payload, type) and issubclass(source.payload, Message):
            self._type, self._indexes = source.payload.DESCRIPTOR.full_name, indexes_of(source.payload.DESCRIPTOR)
        self._wrapping = source.wrapping
        self._retries = Retries.of(source.retries)
        self._event_ids = source.event_id if isinstance(source.event_id, EventIds) else None
        self.enveloped = source.wrapping is Wrapping.ENVELOPE

    def open(self, record: InputRecord) -> None:
        """Parse a record's value: sets its `message`, `wrapped` and `data`.

        Raises:
            EnvelopeError: With the reason code of the first rule that is broken.
        """
        value, record.retries = record.value, self._retries
        if not value:
            raise EnvelopeError(Reason.EMPTY, "the record has no value")
        if not self.enveloped:
            back = redriven_payload(value, self._limits)
            # The time of the event is that of the record that was rejected, not of the one that redrive wrote.
            stamp = record.timestamp_ms if back is None else back.chain[0].timestamp_ms
            self._begin(record, value if back is None else back.payload, stamp)
            if back is not None:
                # Its lane and position are those of the rejected record; see `jobs.dead_letters.redrive`.
                record.message.chain.extend(parse(value, self._limits).chain)
            self._identify(record)
            if back is not None:
                record.wrapped = rewrite(record.message, limits=self._limits)
            return
        wrapped = strip_frame(value) if value[0] == 0 else value
        record.message = message = parse(wrapped, self._limits)
        record.wrapped = wrapped
        if not message.sealed:
            from_message(message, self._limits)  # without a seal its hops were not checked
        if self._parse:
            if self._type and message.payload_type and message.payload_type != self._type:
                raise EnvelopeError(Reason.UNKNOWN_PAYLOAD_TYPE, f"the payload is not the {self._type} declared")
            record.data = self._parse(self._unframed(message.payload))

    def _begin(self, record: InputRecord, value: bytes, timestamp_ms: int | None) -> None:
        """Begin the envelope of a record that is the root of its event, with the timestamp of that record."""
        if not value:
            raise EnvelopeError(Reason.EMPTY, "the record that was redriven has no value")
        if len(value) > self._limits.payload_bytes:
            raise EnvelopeError(
                Reason.PAYLOAD_TOO_LARGE, f"{len(value)} bytes, the limit is {self._limits.payload_bytes}"
            )
        payload = self._unframed(value)
        record.message = message = self._begun(payload, record.key, record.headers)
        if timestamp_ms is not None and timestamp_ms >= 0 and not message.HasField("event_time_us"):
            message.event_time_us = micros_of(timestamp_ms)
        if self._type and not message.payload_type:
            message.payload_type = self._type
        if self._parse:
            record.data = self._parse(payload)

    def _identify(self, record: InputRecord) -> None:
        """Make an event id; a redriven record has that of the rejected one."""
        if self._event_ids:
            own = record.lineage.reduced().own if record.message.chain else record.node
            place = coordinates_of(own.topic, own.partition, own.offset, own.topic_id, own.cluster, own.leader_epoch)
            record.message.event_id = self._event_ids.of(place, record.data)

    def _unframed(self, value: bytes) -> bytes:
        """Strip Schema Registry's frame: it begins with a zero byte; protobuf messages and JSON do not."""
        if value[:1] != b"\0" or not self._parse:
            return value
        return strip_frame(value, self._indexes) if self._type else value[SCHEMA_ID_FRAME:]

    def _begun(self, payload: bytes, key: bytes | None, headers: Headers) -> pb.Envelope:
        if self._wrapping is Wrapping.NONE:
            trace = _traceparent(headers) if headers else ""
            return pb.Envelope(format=FORMAT, payload=payload, key=key, traceparent=trace)
        event = from_cloudevents(headers, payload, key)
        return pb.Envelope(
            format=FORMAT,
            payload=payload,
            key=key,
            event_id=event.event_id,
            event_time_us=event.event_time_us,
            payload_type=event.payload_type,
            content_type=event.content_type,
            producer=event.producer,
            traceparent=event.traceparent,
        )


def _traceparent(headers: Headers) -> str:
    found = [value for name, value in headers if name == TRACEPARENT and value]
    # W3C trace context is ASCII; any other value is not a trace context and stays in its header.
    return found[-1].decode() if found and found[-1].isascii() else ""


def _parser(payload: type[JsonPayload] | type[Message] | None) -> PayloadParser | None:
    if payload is None:
        return None
    if payload is JsonPayload:
        return _json
    if issubclass(payload, Message):
        from_string = payload.FromString

        def protobuf(content: bytes) -> Message:
            try:
                return from_string(content)
            except DecodeError as error:
                raise EnvelopeError(Reason.BAD_PAYLOAD, "the payload is not the declared protobuf message") from error

        return protobuf
    raise TypeError(f"a payload is JsonPayload or a protobuf message class, not {payload!r}")


def _json(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except (ValueError, RecursionError) as error:  # msgspec's errors, text that is not UTF-8, and thousands of levels
        raise EnvelopeError(Reason.BAD_PAYLOAD, "the payload is not JSON, or too deep") from error

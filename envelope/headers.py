"""The envelope's mirror in Kafka headers, and events whose metadata is in headers only: CloudEvents' binary mode.

The mirror is a convenience for readers that do not parse envelopes; the envelope is authoritative.

| header | from |
|---|---|
| `ce_specversion`, `ce_id`, `ce_source`, `ce_type`, `ce_time` | CloudEvents 1.0, Kafka protocol binding, binary content mode |
| `content-type` | media type of the payload |
| `traceparent` | W3C trace context |
| `hw-root` | `topic:partition:offset` of the root, for cheap filtering |
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, TypeAlias

from envelope.errors import EnvelopeError, Reason
from envelope.message import Envelope

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]
"""Kafka's headers: pairs of name and value, in order; names may repeat."""

ROOT: Final = "hw-root"
TRACEPARENT: Final = "traceparent"
CONTENT_TYPE: Final = "content-type"
MIRRORED: Final = frozenset(
    {ROOT, TRACEPARENT, CONTENT_TYPE, "ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time"}
)
"""Names of all headers that `mirror` may write."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_US, _DAY_US = 1_000_000, 86_400_000_000
_LEAP_SECOND: Final = re.compile(r"T[0-9:]{6}60([.][0-9]+)?(Z|[+-][0-9:]+)$")
_SPEC_MAJOR: Final = "1."


def mirror(envelope: Envelope, root: str, source: str) -> list[tuple[str, bytes | None]]:
    """Return the headers that repeat the envelope's metadata.

    Args:
        envelope: The envelope.
        root: `topic:partition:offset` of its root.
        source: `ce_source` when the envelope names no producer, for example the republisher's name.
    """
    producer = envelope.producer or source
    texts = {
        "ce_specversion": "1.0",
        "ce_id": envelope.event_id.removeprefix(_of_source(producer)) or root,
        "ce_source": producer,
        "ce_type": envelope.payload_type or "message",
        "ce_time": "" if envelope.event_time_us is None else _time_text(envelope.event_time_us),
        CONTENT_TYPE: envelope.content_type,
        TRACEPARENT: envelope.traceparent,
        ROOT: root,
    }
    return [(name, text.encode()) for name, text in texts.items() if text]


def from_cloudevents(headers: Headers, payload: bytes, key: bytes | None) -> Envelope:
    """Return the envelope of an event in CloudEvents' binary mode: context in headers, data in the value.

    Source and id together identify an event (CloudEvents 1.0, "id"), so the event id is `source#id`, with `%25` for `%`
    and `%23` for `#` in the source: the first `#` ends it.

    Raises:
        EnvelopeError: `MISSING_FIELD` without specversion, id, source or type; `UNSUPPORTED_FORMAT` for another
            major version; `BAD_PAYLOAD` for text that is not UTF-8 or an invalid time.
    """
    try:
        found = {name.lower(): value.decode() for name, value in headers if value is not None and _is_context(name)}
    except UnicodeDecodeError as error:
        raise EnvelopeError(Reason.BAD_PAYLOAD, "a CloudEvents header is not UTF-8") from error
    if missing := [name for name in ("ce_specversion", "ce_id", "ce_source", "ce_type") if not found.get(name)]:
        raise EnvelopeError(Reason.MISSING_FIELD, f"missing header {', '.join(missing)}")
    if not found["ce_specversion"].startswith(_SPEC_MAJOR):
        raise EnvelopeError(Reason.UNSUPPORTED_FORMAT, "the CloudEvents version is not 1")
    return Envelope(
        payload=payload,
        key=key,
        event_id=f"{_of_source(found['ce_source'])}{found['ce_id']}",
        event_time_us=_time_us(found["ce_time"]) if found.get("ce_time") else None,
        payload_type=found["ce_type"],
        content_type=found.get(CONTENT_TYPE, ""),
        producer=found["ce_source"],
        traceparent=found.get("ce_traceparent") or found.get(TRACEPARENT, ""),
    )


def is_cloudevents(name: str) -> bool:
    """Whether a header of this name is a CloudEvents context attribute, which the envelope stores instead."""
    return name.lower().startswith("ce_")


def _is_context(name: str) -> bool:
    return is_cloudevents(name) or name.lower() in (CONTENT_TYPE, TRACEPARENT)


def _of_source(source: str) -> str:
    """What the ids of a source's events begin with."""
    return f"{source.replace('%', '%25').replace('#', '%23')}#"


def _time_text(time_us: int) -> str:
    try:
        return (_EPOCH + timedelta(microseconds=time_us)).isoformat().replace("+00:00", "Z")
    except OverflowError:  # years that RFC 3339 cannot write
        return ""


def _time_us(text: str) -> int:
    """Microseconds since 1970 of a date and time as RFC 3339 has them: any case, and 23:59:60 for a leap second."""
    text = text.upper()
    leap = _LEAP_SECOND.search(text)
    try:
        time = datetime.fromisoformat(f"{text[: leap.start() + 7]}59{text[leap.start() + 9 :]}" if leap else text)
        if leap:
            time += timedelta(seconds=1)
    except (ValueError, OverflowError) as error:
        raise EnvelopeError(Reason.BAD_PAYLOAD, "ce_time is not an RFC 3339 time") from error
    if time.tzinfo is None:
        raise EnvelopeError(Reason.BAD_PAYLOAD, "ce_time has no offset from UTC")
    micros = (time - _EPOCH) // timedelta(microseconds=1)
    if leap and micros % _DAY_US >= _SECOND_US:  # leap seconds are at the end of a day in UTC
        raise EnvelopeError(Reason.BAD_PAYLOAD, "ce_time is not an RFC 3339 time")
    return micros

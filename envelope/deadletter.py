"""Dead letters: a record that could not be used, byte for byte, with headers that give its coordinates and the reason.

| header | text |
|---|---|
| `hw-dlq-topic`, `hw-dlq-partition`, `hw-dlq-offset` | coordinates of the record |
| `hw-dlq-topic-id` | Kafka's id of its topic, when known |
| `hw-dlq-lineage` | `topic:partition:offset -> ...` from the root to the record |
| `hw-dlq-stage` | stage that could not use it, or that it was bound for; of a republisher, its filter if that rejected it |
| `hw-dlq-reason` | reason code |
| `hw-dlq-detail` | what was wrong, without any value of the record |
| `hw-dlq-error` | name of the type of the exception that user code raised |
| `hw-dlq-error-at` | place in that code: `fleet.py:14 in fold` |
| `hw-dlq-error-text` | text of that exception, at most 1,000 bytes. It may quote the record, and in a fold the state of its key |
| `hw-dlq-hole` | `1` when it left a hole in its state; a redriven copy is then folded whatever its position |
| `hw-dlq-items` | items of the record that the flow diverted, such as `1,3.0`; absent for the whole record |
| `hw-dlq-form` | what the value is: `envelope` or `payload` |
| `hw-dlq-attempt` | number of attempts so far |
| `hw-dlq-application` | flow or republisher that rejected it |
| `hw-dlq-generation` | generation of that flow, unless it is the first |
| `hw-dlq-time` | time of the rejection, in ISO 8601 and UTC |
| `hw-dlq-timestamp` | Kafka's timestamp of the record, in milliseconds since 1970 |
| `hw-dlq-trimmed` | parts that did not fit: `value`, `headers`, `key`; the original record stays at its coordinates |
| `hw-dlq-value-bytes`, `hw-dlq-value-sha256` | length and digest of a trimmed value |
| `hw-dlq-key-bytes`, `hw-dlq-key-sha256` | the same of a trimmed key |

Dead letters of Kafka Connect (`__connect.errors.*`) and Spring Kafka (`kafka_dlt-*`, `kafka_original-*`) are read too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from typing import Final, Self

from envelope.errors import Reason
from envelope.headers import Headers
from envelope.raised import Raised, cut

PREFIX: Final = "hw-dlq-"
_RECORD_OVERHEAD: Final = 256  # a record batch's own 61 bytes, lengths and deltas, with room to spare
_HEADER_OVERHEAD: Final = 10  # two varint lengths of at most five bytes
_DIGESTS: Final = 400  # the headers for a trimmed key and value, with room to spare
_EXPLANATION: Final = frozenset(f"{PREFIX}{name}" for name in ("detail", "error-at", "error-text"))


class Form(StrEnum):
    """Form of a record's value."""

    ENVELOPE = "envelope"
    """An envelope, or a value that should be one."""
    PAYLOAD = "payload"
    """The payload itself: its topic has no envelopes."""


@dataclass(frozen=True, slots=True)
class DeadLetterHeaders:
    """Facts about a record that could not be used. They contain no value of it, except in the text of `raised`.

    Attributes:
        topic: Topic of the record.
        partition: Its partition.
        offset: Its offset.
        reason: Reason code; None for a dead letter of another system, or a code that this version does not know.
        topic_id: Kafka's id of the topic; empty when unknown.
        lineage: Text of its lineage; empty when unknown.
        stage: Stage that could not use it; empty before the first stage.
        attempt: Number of attempts so far.
        application: Flow, republisher, connector or consumer group that rejected it.
        time_ms: Time of the rejection in milliseconds since 1970; None when unknown.
        raised: Exception of user code, or the one that another system reports; None when there was none.
        detail: What was wrong, without any value of the record.
        hole: It left a hole in the state of its key.
        generation: Generation of the flow that rejected it.
        items: Its items that the flow diverted, by their index in each flat-map; empty for the record as a whole.
        form: Form of its value; None when the dead letter does not give it.
        timestamp_ms: Kafka's timestamp of the record, in milliseconds since 1970; None when unknown.
        leader_epoch: Leader epoch of the record; None when unknown. A republisher writes it, since its hops have it.
    """

    topic: str
    partition: int
    offset: int
    reason: Reason | None
    topic_id: str = ""
    lineage: str = ""
    stage: str = ""
    attempt: int = 1
    application: str = ""
    time_ms: int | None = None
    raised: Raised | None = None
    hole: bool = False
    generation: int = 1
    items: tuple[tuple[int, ...], ...] = ()
    form: Form | None = None
    detail: str = ""
    timestamp_ms: int | None = None
    leader_epoch: int | None = None

    def headers(self) -> list[tuple[str, bytes | None]]:
        """The headers that carry these facts."""
        texts = {
            "topic": self.topic,
            "partition": str(self.partition),
            "offset": str(self.offset),
            "topic-id": self.topic_id,
            "lineage": self.lineage,
            "stage": self.stage,
            "reason": self.reason.value if self.reason else "",
            "detail": cut(self.detail),
            "error": self.raised.kind if self.raised else "",
            "error-at": self.raised.at if self.raised else "",
            "error-text": self.raised.text if self.raised else "",
            "hole": "1" if self.hole else "",
            "items": ",".join(".".join(map(str, item)) for item in self.items),
            "form": self.form.value if self.form else "",
            "attempt": str(self.attempt),
            "application": self.application,
            "generation": str(self.generation) if self.generation > 1 else "",
            "time": "" if self.time_ms is None else _time_text(self.time_ms),
            "timestamp": "" if self.timestamp_ms is None or self.timestamp_ms < 0 else str(self.timestamp_ms),
            "leader-epoch": "" if self.leader_epoch is None else str(self.leader_epoch),
        }
        return [(PREFIX + name, text.encode()) for name, text in texts.items() if text]

    @classmethod
    def read(cls, headers: Headers) -> Self | None:
        """Read the facts from a dead letter's headers; None when no supported system wrote them."""
        found = {name: value for name, value in headers if value is not None}
        for kind in (_ours, _connect, _spring("kafka_dlt-"), _spring("kafka_")):
            try:
                if facts := kind(found):
                    return cls(**facts)  # type: ignore[arg-type]
            except (KeyError, ValueError):  # missing, not a number or not text: another system wrote them
                continue
        return None


@dataclass(frozen=True, slots=True)
class DeadLetterRecord:
    """A dead letter's record, ready for the dead-letter topic.

    Attributes:
        key: Key.
        value: Value.
        headers: The record's own headers, then the `hw-dlq-*` headers.
    """

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


def own_headers(headers: Iterable[tuple[str, bytes | None]]) -> list[tuple[str, bytes | None]]:
    """The record's own headers: all but those that this module writes."""
    return [header for header in headers if not header[0].startswith(PREFIX)]


def dead_letter_record(
    letter: DeadLetterHeaders, key: bytes | None, value: bytes | None, headers: Headers, max_bytes: int
) -> DeadLetterRecord:
    """Return the record for the dead-letter topic: key, value and headers byte for byte, then the `hw-dlq-*` headers.

    A record larger than `max_bytes` is trimmed: the explanation of the failure first, then the value, then the
    headers, then the key. Length and digest of a trimmed value or key are kept; the coordinates point to the original.

    Args:
        letter: The facts.
        key: Key of the record.
        value: Value of the record.
        headers: Headers of the record; those of an earlier dead letter are replaced.
        max_bytes: Largest record that the dead-letter topic accepts (its `max.message.bytes`).
    """
    own, facts = own_headers(headers), letter.headers()
    brief = [header for header in facts if header[0] not in _EXPLANATION]
    beside = _RECORD_OVERHEAD + _size(own) + len(key or b"")
    for headers_of_ours in (facts, brief):
        if beside + _size(headers_of_ours) + len(value or b"") <= max_bytes:
            return DeadLetterRecord(key, value, own + headers_of_ours)
    if beside + _size(facts) + _DIGESTS > max_bytes:
        facts = brief  # not at the cost of the record's own headers and key
    room = max_bytes - _RECORD_OVERHEAD - _size(facts) - _DIGESTS
    trimmed = ["value"]
    facts += _digest("value", value or b"")
    if _size(own) + len(key or b"") > room:
        trimmed.append("headers")
        own = []
    if len(key or b"") > room:
        trimmed.append("key")
        facts += _digest("key", key or b"")
        key = (key or b"")[: max(0, room)]
    room -= _size(own) + len(key or b"")
    facts.append((f"{PREFIX}trimmed", ", ".join(trimmed).encode()))
    return DeadLetterRecord(key, (value or b"")[: max(0, room)], own + facts)


def size_of(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """Upper bound of a record's size in a topic, in bytes before compression."""
    return _RECORD_OVERHEAD + len(key or b"") + len(value or b"") + _size(headers)


def _digest(part: str, content: bytes) -> list[tuple[str, bytes | None]]:
    return [
        (f"{PREFIX}{part}-bytes", str(len(content)).encode()),
        (f"{PREFIX}{part}-sha256", sha256(content).hexdigest().encode()),
    ]


def _size(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value or b"") + _HEADER_OVERHEAD for name, value in headers)


def _ours(found: dict[str, bytes]) -> dict[str, object] | None:
    texts = {name.removeprefix(PREFIX): value.decode() for name, value in found.items() if name.startswith(PREFIX)}
    if "topic" not in texts:
        return None
    reason = texts.get("reason")
    return {
        "topic": texts["topic"],
        "partition": int(texts["partition"]),
        "offset": int(texts["offset"]),
        "topic_id": texts.get("topic-id", ""),
        "lineage": texts.get("lineage", ""),
        "stage": texts.get("stage", ""),
        "reason": Reason(reason) if reason in set(Reason) else None,
        "detail": texts.get("detail", ""),
        "raised": _raised(texts.get("error", ""), texts.get("error-at", ""), texts.get("error-text", "")),
        "hole": texts.get("hole") == "1",
        "attempt": int(texts.get("attempt", "1")),
        "application": texts.get("application", ""),
        "generation": int(texts.get("generation", "1")),
        "items": tuple(tuple(map(int, item.split("."))) for item in texts.get("items", "").split(",") if item),
        "form": Form(texts["form"]) if "form" in texts else None,
        "time_ms": _time_ms(texts["time"]) if "time" in texts else None,
        "timestamp_ms": int(texts["timestamp"]) if "timestamp" in texts else None,
        "leader_epoch": int(texts["leader-epoch"]) if "leader-epoch" in texts else None,
    }


def _raised(kind: str, at: str = "", text: str = "") -> Raised | None:
    return Raised(kind, at, text) if kind else None


def _connect(found: dict[str, bytes]) -> dict[str, object] | None:
    """Kafka Connect's DeadLetterQueueReporter: every value is text."""
    start = "__connect.errors."
    texts = {name.removeprefix(start): value.decode() for name, value in found.items() if name.startswith(start)}
    if "topic" not in texts:
        return None
    return {
        "topic": texts["topic"],
        "partition": int(texts["partition"]),
        "offset": int(texts["offset"]),
        "reason": None,
        "stage": texts.get("stage", ""),
        "raised": _raised(texts.get("exception.class.name", "")),
        "application": texts.get("connector.name", ""),
    }


def _spring(start: str) -> Callable[[dict[str, bytes]], dict[str, object] | None]:
    """Spring Kafka's DeadLetterPublishingRecoverer (`kafka_dlt-`) and retry topics (`kafka_`): numbers are big-endian."""

    def read(found: dict[str, bytes]) -> dict[str, object] | None:
        if f"{start}original-topic" not in found:
            return None
        partition, offset = found.get(f"{start}original-partition", b""), found.get(f"{start}original-offset", b"")
        if (len(partition), len(offset)) != (4, 8):
            return None
        return {
            "topic": found[f"{start}original-topic"].decode(),
            "partition": int.from_bytes(partition, signed=True),
            "offset": int.from_bytes(offset, signed=True),
            "reason": None,
            "raised": _raised(found.get(f"{start}exception-fqcn", b"").decode()),
            "attempt": int.from_bytes(found.get("retry_topic-attempts", b"\0\0\0\1")),
            "application": found.get(f"{start}original-consumer-group", b"").decode(),
        }

    return read


def _time_text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _time_ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)

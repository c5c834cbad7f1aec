"""Event ids for records that have none: from their coordinates, from a field, or from a hash of fields.

The same record gets the same id in every process and version; golden tests hold the texts.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final, Self

from envelope.errors import EnvelopeError, Reason

_HASH_CHARS: Final = 32  # of SHA-256 in hexadecimal: 128 bits, so that 10**12 events collide with probability 1.5e-15


class EventIdKind(StrEnum):
    """Where an event id comes from."""

    COORDINATES = "coordinates"
    """Topic, its id, partition and offset: unique, but another one for a record that its producer sends again."""
    FIELD = "field"
    """A field of the payload: text or a whole number."""
    HASH = "hash"
    """A hash of fields of the payload, in the given order: equal for records that agree in these fields."""


@dataclass(frozen=True, slots=True)
class EventIds:
    """How records without an event id get one.

    Attributes:
        kind: Where the id comes from.
        names: Names of the fields; a dot leads into an object: `order.number`.

    Raises:
        ValueError: A number of names that the kind does not take.
    """

    kind: EventIdKind
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least, most = {"coordinates": (0, 0), "field": (1, 1), "hash": (1, 100)}[self.kind.value]
        if not least <= len(self.names) <= most or not all(name.strip() == name and name for name in self.names):
            raise ValueError("write coordinates, field:NAME, or hash:NAME,NAME,...")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `coordinates`, `field:NAME` or `hash:NAME,NAME,...`.

        Raises:
            ValueError: The text is none of these.
        """
        kind, _, names = text.partition(":")
        try:
            return cls(EventIdKind(kind), tuple(names.split(",")) if names else ())
        except ValueError:
            raise ValueError(
                f"event id {text!r}: write coordinates, field:NAME, or hash:NAME,NAME,... with the names of fields"
            ) from None

    def of(self, coordinates: str, data: Any) -> str:
        """Return the event id of a record.

        Args:
            coordinates: Its coordinates as text, see `coordinates_of`.
            data: Its payload: a mapping or a protobuf message; None if nothing declares it.

        Raises:
            EnvelopeError: `MISSING_FIELD` or `BAD_PAYLOAD`: the payload has no such field, or one that is neither text
                nor a whole number, or whose value cannot be hashed.
        """
        if self.kind is EventIdKind.COORDINATES:
            return coordinates
        values = [_field(data, name) for name in self.names]
        if self.kind is EventIdKind.FIELD:
            return _text(values[0], self.names[0])
        canonical = b"".join(_canonical(value, name) for value, name in zip(values, self.names, strict=True))
        return sha256(canonical).hexdigest()[:_HASH_CHARS]


def coordinates_of(
    topic: str, partition: int, offset: int, topic_id: str = "", cluster: str = "", leader_epoch: int | None = None
) -> str:
    """The coordinates of a record as an event id: `cluster/topic#id:partition:offset`, and `@epoch` from epoch 1 on.

    A log that lost its end (KIP-320) gives an offset to two records, in two leader epochs.
    """
    epoch = f"@{leader_epoch}" if leader_epoch is not None and leader_epoch > 0 else ""
    return f"{cluster}{'/' * bool(cluster)}{topic}{'#' * bool(topic_id)}{topic_id}:{partition}:{offset}{epoch}"


def _field(data: Any, name: str) -> Any:
    for part in name.split("."):
        if isinstance(data, Mapping):
            if part not in data:
                raise _missing(name)
            data = data[part]
        elif hasattr(data, "DESCRIPTOR") and part in data.DESCRIPTOR.fields_by_name:
            data = getattr(data, part)
        else:
            raise _missing(name)
    return data


def _missing(name: str) -> EnvelopeError:
    return EnvelopeError(
        Reason.MISSING_FIELD, f"the payload has no field {name!r}, of which a key or an event id is made"
    )


def _text(value: Any, name: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise EnvelopeError(
            Reason.BAD_PAYLOAD, f"field {name!r}, the event id, is neither text nor a whole number, or is empty"
        )
    return str(value)


def _canonical(value: Any, name: str) -> bytes:
    """A value with its type and length, so that neither `1` and `"1"`, nor `ab, c` and `a, bc`, hash alike."""
    for kind, letter, write in _KINDS:
        if isinstance(value, kind):
            content = write(value)
            return b"%s%d:%s" % (letter, len(content), content)
    raise EnvelopeError(Reason.BAD_PAYLOAD, f"field {name!r} has a value of a type that cannot be hashed")


_KINDS: Final[tuple[tuple[Any, bytes, Callable[[Any], bytes]], ...]] = (
    (type(None), b"n", lambda _: b""),
    (bool, b"b", lambda value: b"%d" % value),
    (int, b"i", lambda value: b"%d" % value),
    (float, b"f", lambda value: repr(value).encode()),
    (str, b"s", lambda value: value.encode("utf-8", "surrogatepass")),
    (bytes, b"x", bytes),
    (
        list | dict,
        b"j",
        lambda value: json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode(
            "utf-8", "surrogatepass"
        ),
    ),
)

"""What a copy reads from: the interface of its sources."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec

from envelope import Envelope, EnvelopeError, encode
from envelope.event_ids import EventIds
from envelope.headers import Headers
from envelope.limits import DEFAULT_LIMITS
from jobs.copying.counts import CopyStatistics
from jobs.republish.absence import Unsafe
from persistence.kafka import BrokerRefused, KafkaSettings

Position: TypeAlias = Mapping[str, Any]
"""Where a source continues: plain values that JSON can hold."""


class SourceError(BrokerRefused):
    """A source cannot be copied until it is corrected; the text names the place."""


@dataclass(frozen=True, slots=True)
class Output:
    """One record to produce.

    Attributes:
        value: Its value.
        key: Its key.
        headers: Its headers.
        dead: It goes to the dead-letter topic.
    """

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    dead: bool = False


@dataclass(slots=True)
class Read:
    """What one call of `CopySource.read` returned.

    Attributes:
        outputs: Records to produce, in order.
        counts: What was read.
    """

    outputs: list[Output] = field(default_factory=list)
    counts: CopyStatistics = field(default_factory=CopyStatistics)


@dataclass(frozen=True, slots=True)
class Task:
    """What a source needs to know of its copy.

    Attributes:
        name: Name of the copy.
        target: Topic to write.
        most_bytes: Largest record that it accepts, in bytes.
        dead_letter: Largest record that the dead-letter topic accepts, in bytes; None without one.
        epoch: Number of this run of the copy.
        until_caught_up: The copy stops at the current end of the source.
        settings: Settings of the target's cluster.
    """

    name: str
    target: str
    most_bytes: int
    dead_letter: int | None
    epoch: int
    until_caught_up: bool
    settings: KafkaSettings


class CopySource(Protocol):
    """A source of a copy. It is read in one order, which a position divides into what was copied and what was not."""

    @property
    def kind(self) -> str:
        """What it is, in one word; a position of another kind is refused."""
        ...

    def reads(self, target: str) -> bool:
        """Whether it reads the target itself, so that messages would loop forever."""
        ...

    def open(self, task: Task, position: Position | None) -> None:
        """Begin to read.

        Args:
            task: The copy.
            position: `position` after the last committed read; None to begin at the beginning.

        Raises:
            Unsafe: The source is not the one to which the position belongs.
        """
        ...

    def read(self, most: int) -> Read:
        """Return up to `most` more records: those available now, or within a fifth of a second."""
        ...

    def check(self) -> None:
        """Called after records were read and before they are committed.

        Raises:
            BrokerError: They may not belong to the source.
        """
        ...

    @property
    def position(self) -> Position:
        """Where to continue after everything that `read` has returned."""
        ...

    @property
    def sequence(self) -> int | None:
        """Sequence id of the last output; None before the first, or if its chain identifies it."""
        ...

    @property
    def caught_up(self) -> bool:
        """Whether everything was read that was there at the beginning."""
        ...

    def close(self) -> None:
        """Release what it holds; a second call does nothing."""
        ...


class ItemWriter:
    """Makes the envelopes of a source outside of Kafka: the copy is their producer, so that they carry its ids.

    Args:
        task: The copy.
        key: Name of the field that is the record's key; None for no key.
        event_ids: How messages get an event id; None for none.
        content_type: Media type of the payloads.
    """

    def __init__(self, task: Task, *, key: str | None, event_ids: EventIds | None, content_type: str) -> None:
        self._task = task
        self._key = None if key is None else EventIds.parse(f"field:{key}")
        self._event_ids = event_ids
        self._content_type = content_type

    def write(self, payload: bytes, sequence: int, place: str, data: Callable[[], Any]) -> Output:
        """Return the record of one item.

        Args:
            payload: Its payload.
            sequence: Its sequence id.
            place: Where it is in the source, for an error.
            data: Returns its fields.

        Raises:
            SourceError: It cannot be copied.
        """
        try:
            fields = data() if self._key or (self._event_ids and self._event_ids.names) else None
            key = self._key.of("", fields).encode() if self._key else None
            coordinates = f"{self._task.name}:{sequence}"
            value = encode(
                Envelope(
                    payload,
                    key=key,
                    event_id=self._event_ids.of(coordinates, fields) if self._event_ids else "",
                    content_type=self._content_type,
                    producer=self._task.name,
                    sequence=sequence,
                    producer_epoch=self._task.epoch,
                ),
                DEFAULT_LIMITS,
            )
        except (EnvelopeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            why = str(error) if isinstance(error, EnvelopeError) else "it is not JSON"
            raise SourceError(
                f"{place} cannot be copied ({why})", "Correct it in the source, or use other fields"
            ) from None
        if len(value) + len(key or b"") > self._task.most_bytes:
            raise SourceError(
                f"{place} cannot be copied: a message of {len(value)} bytes, {self._task.target} takes "
                f"{self._task.most_bytes}",
                "Raise max.message.bytes of the topic",
            )
        return Output(value, key)


def changed(what: str) -> Unsafe:
    """The error for a source that is not the one that was copied before."""
    return Unsafe(what, "To copy it from its beginning, give the copy another name (--name)")

"""Expiry: states that have been idle for a time leave the store."""

from dataclasses import dataclass

from aggregations.definition.arguments import check_type
from aggregations.definition.times import MICROS, due_in_steps, put_off, step_of
from aggregations.definition.windows import duration, length_text
from aggregations.errors import FlowError


@dataclass(frozen=True, slots=True)
class Expiry:
    """How long the states of a stage stay without an event.

    A state has expired for an event if the state's latest event time lies at least this time before what the log of the
    event's partition has reached, the event included. The event then begins a new state. An event that is itself at
    least this time behind the log of its partition is too late.

    Attributes:
        seconds: The time, in seconds of event time.
    """

    seconds: int

    @property
    def definition(self) -> str:
        """Canonical text."""
        return f"expire {self.seconds}"

    def ends_us(self, time_us: int) -> int:
        """Event time at which a state with this latest event time has expired, in microseconds since 1970."""
        return time_us + self.seconds * MICROS

    @staticmethod
    def due(time_us: int) -> int:
        """The due time of a state with this latest event time: the same in seconds, rounded up, whatever the expiry."""
        return -(-time_us // MICROS)

    def noted_due(self, time_us: int) -> int:
        """The due time that a store notes: the first time at or after `due` up to which states leave.

        Most writes of a state that is often written do not change it, and neither do they change a store's index.
        """
        return put_off(self.due(time_us), step_of(self.seconds))

    def due_until(self, closing_us: int) -> int:
        """The latest due time of a state that leaves the store, in seconds since 1970.

        Args:
            closing_us: The closing watermark, in microseconds since 1970.
        """
        return due_in_steps(closing_us, self.seconds, step_of(self.seconds))

    @staticmethod
    def is_removed(time_us: int, removed: int | None) -> bool:
        """Whether an event with this time may belong to a state that has left the store.

        Args:
            time_us: Its event time, in microseconds since 1970.
            removed: Due time up to which states have left, in seconds since 1970; None if none has.
        """
        return removed is not None and time_us <= removed * MICROS

    def __str__(self) -> str:
        return length_text(self.seconds)


def checked_expiry(given: str | None, window: object) -> Expiry | None:
    """Read the argument `expire_after=` of a stage.

    Raises:
        FlowError: It is not a length of time, or the stage has windows.
    """
    if given is None:
        return None
    check_type("expire_after=", given, str, "a length of time, such as '30d'")
    if window is not None:
        raise FlowError("expire_after= is for stages without windows; the states of windows leave by their retention=")
    return Expiry(duration("expire_after=", given))

"""Crashes and interruptions: a fault at the nth effect of the next run, and runs that can be suspended at an effect."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

from persistence.errors import Transient
from persistence.kafka import BrokerUnavailable

T = TypeVar("T")


class Crash(BaseException):
    """The simulated process dies here. No code of the engine may catch this."""


def crash() -> NoReturn:
    """Die, for the faults that tests inject."""
    raise Crash


class End(StrEnum):
    """How an effect ends."""

    BEFORE = "before"
    """Not applied, and the process dies."""
    AFTER = "after"
    """Applied, and the process dies."""
    ERROR = "error"
    """Not applied, and the process gets an error."""
    UNANSWERED = "unanswered"
    """Applied, and the process gets an error, as if the answer was lost."""
    PAUSE = "pause"
    """The process is suspended before it."""


ENDS = (End.BEFORE, End.AFTER, End.ERROR, End.UNANSWERED)


class Script:
    """The faults of one process.

    Args:
        ends: End by number of the effect, from 0, or by kind of effect and its number within that kind, from 0.

    Attributes:
        reached: The effects so far, in order.
        counts: Effects are counted even if no fault is planned.
        pause: Called where the process is suspended; returns when it resumes.
    """

    def __init__(self, ends: Mapping[Any, End] | None = None) -> None:
        self.ends = ends or {}
        self.reached: list[str] = []
        self.counts = bool(self.ends)
        self.pause: Callable[[], None] = lambda: None
        self._kinds: Counter[str] = Counter()

    def effect(self, point: str, action: Callable[[], T]) -> T:
        """Run an effect, or its fault."""
        if not self.counts:
            return action()
        kind, number = point.partition(":")[0], len(self.reached)
        end = self.ends.get(number) or self.ends.get((kind, self._kinds[kind]))
        self.reached.append(point)
        self._kinds[kind] += 1
        if end is None:
            return action()
        if end is End.PAUSE:
            self.pause()
            return action()
        if end in (End.AFTER, End.UNANSWERED):
            action()
        if end in (End.BEFORE, End.AFTER):
            raise Crash(point)
        if kind == "republish":
            raise BrokerUnavailable(f"injected at {point}", "Start again")
        raise Transient(f"injected at {point}")


class Faults:
    """Passes every effect to the script of the running process."""

    def __init__(self) -> None:
        self.script = Script()

    def effect(self, point: str, action: Callable[[], T]) -> T:
        """Run an effect, or its fault."""
        return self.script.effect(point, action)


class Process:
    """A simulated process, which runs until it ends or is suspended; one runs at a time.

    Args:
        work: Its code; the argument is the function that suspends it.
    """

    def __init__(self, work: Callable[[Callable[[], None]], None]) -> None:
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._killed = False
        self.ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._back.acquire()

    def wake(self) -> None:
        """Resume it until it ends or is suspended again."""
        if not self.ended:
            self._go.release()
            self._back.acquire()

    def kill(self) -> None:
        """Let it die where it is suspended."""
        self._killed = True
        self.wake()

    def raise_error(self) -> None:
        """Raise the error that ended it, unless it was killed."""
        if self.error is not None and not isinstance(self.error, Crash):
            raise self.error

    def _run(self, work: Callable[[Callable[[], None]], None]) -> None:
        try:
            work(self._stand_still)
        except BaseException as error:
            self.error = error
        self.ended = True
        self._back.release()

    def _stand_still(self) -> None:
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Crash("killed while it stood still")

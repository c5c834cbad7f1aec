"""Deaths and interruptions: a fault at the nth effect of what runs next, and runs that can be paused at one."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from persistence.errors import Transient
from persistence.kafka import BrokerUnavailable

T = TypeVar("T")


class Crash(BaseException):
    """The process dies here. No code of the engine may catch it."""


class End(StrEnum):
    """How an effect ends."""

    BEFORE = "before"
    """Not applied, and the process dies."""
    AFTER = "after"
    """Applied, and the process dies."""
    ERROR = "error"
    """Not applied, and the process is told so."""
    UNANSWERED = "unanswered"
    """Applied, and the process is told that it does not know."""
    PAUSE = "pause"
    """The process stands still in front of it."""


ENDS = (End.BEFORE, End.AFTER, End.ERROR, End.UNANSWERED)


class Script:
    """What happens to the effects of one process.

    Args:
        ends: End by number of the effect, from 0, or by kind of effect and the how many-th of it, from 0.

    Attributes:
        reached: The effects met, in order.
        counts: Effects are counted though no fault is planned.
        pause: Called where the process stands still; returns when it is woken.
    """

    def __init__(self, ends: Mapping[Any, End] | None = None) -> None:
        self.ends = ends or {}
        self.reached: list[str] = []
        self.counts = bool(self.ends)
        self.pause: Callable[[], None] = lambda: None
        self._kinds: Counter[str] = Counter()

    def effect(self, point: str, action: Callable[[], T]) -> T:
        """Run an effect, or not."""
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
    """Sends every effect to the script of the process that runs now."""

    def __init__(self) -> None:
        self.script = Script()

    def effect(self, point: str, action: Callable[[], T]) -> T:
        """Run an effect, or not."""
        return self.script.effect(point, action)


class Process:
    """Something that runs until it ends or stands still; one runs at a time.

    Args:
        work: What it does, given the function that makes it stand still.
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
        """Let it go on until it ends or stands still again."""
        if not self.ended:
            self._go.release()
            self._back.acquire()

    def kill(self) -> None:
        """Let it die where it stands."""
        self._killed = True
        self.wake()

    def raise_error(self) -> None:
        """Raise what it ended with, if it did not simply die."""
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

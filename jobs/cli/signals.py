"""Ctrl-C and SIGTERM: the first ends the program in order, the second immediately."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jobs.screen import say


class Stopped(KeyboardInterrupt):
    """A signal asked the program to stop while nothing was under way that has to be finished.

    What Ctrl-C undoes without these commands, it undoes with them.
    """


def on_signals(stop: Callable[[], None], line: str, *, idle: Callable[[], bool]) -> None:
    """At the first Ctrl-C or SIGTERM, call `stop` and show `line`; the second ends the process as usual.

    Args:
        stop: Asks the program to end.
        line: What happens now, for people.
        idle: Whether nothing is under way that has to be finished. The handler then raises `Stopped` instead, which
            also interrupts the wait for a server that does not answer.
    """

    def ask(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if idle():
            raise Stopped
        stop()
        say(line)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise `SystemExit` while the block runs, so that child processes are ended.

    The block is left by `SystemExit` even if the signal arrived in a call of a C library that raised another exception
    for it.
    """
    received: list[int] = []

    def leave(number: int, frame: object) -> None:
        received.append(number)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except Exception:
        if received:
            sys.exit(128 + received[0])
        raise
    finally:
        signal.signal(signal.SIGTERM, before)

"""Ctrl-C and SIGTERM: once to end in order, twice to end."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jobs.screen import say


def on_signals(stop: Callable[[], None], line: str) -> None:
    """Call `stop` and say `line` at the first Ctrl-C or SIGTERM; the second one ends the process as usual."""

    def ask(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop()
        say(line)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit` as long as the block runs, so that what was started is ended on the way out.

    The block is left by `SystemExit` also when the signal came inside a call of a C library, out of which it came as
    another exception.
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

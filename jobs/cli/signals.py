"""Ctrl-C and SIGTERM: once to end in order, twice to end."""

import signal
import sys
from collections.abc import Callable

from jobs.screen import say

_received: list[int] = []


def on_signals(stop: Callable[[], None], line: str) -> None:
    """Call `stop` and say `line` at the first Ctrl-C or SIGTERM; the second one ends the process as usual."""

    def ask(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop()
        say(line)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)


def exit_on_sigterm() -> None:
    """Let SIGTERM raise `SystemExit`, so that what was started is ended on the way out."""

    def leave(number: int, frame: object) -> None:
        _received.append(number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def exit_code() -> int | None:
    """Exit code of the signal that ends this process; None when none did."""
    return 128 + _received[0] if _received else None

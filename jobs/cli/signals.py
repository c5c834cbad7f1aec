"""Ctrl-C and SIGTERM: once to end in order, twice to end."""

import signal
from collections.abc import Callable

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

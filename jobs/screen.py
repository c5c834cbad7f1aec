"""Output for people: progress bars on a terminal, plain lines elsewhere, JSON on request."""

import io
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

_LINE_SECONDS: Final = 5.0
"""Seconds between two plain lines of one progress."""
_PATIENCE_SECONDS: Final = 15.0
"""Seconds until an error of a client library counts as lasting."""
_AGAIN_SECONDS: Final = 60.0
"""Seconds between two log lines about one lasting error."""
_LAST_STANDARD: Final = 2
"""Descriptor of standard error."""
_LONGEST: Final = 300
"""Characters of a list or an object in a table: a filter's state contains every id that it remembers."""


class Bar(Protocol):
    """A progress display."""

    def __call__(self, done: int, total: int | None = ..., note: str = ...) -> None:
        """Show the progress; an omitted `total` is not changed."""


class OutputError(RuntimeError):
    """Standard output cannot be written; the text says why."""


def write(text: str) -> None:
    """Write one or more lines of data to standard output immediately: another program may be waiting for them.

    If the reader has closed the pipe (`| head`), the process ends silently with the exit code of SIGPIPE, like other
    programs.

    Raises:
        OutputError: The output is closed or its device is full.
    """
    if sys.stdout is None:
        raise OutputError("standard output is closed")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _give_up(sys.stdout)
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        _give_up(sys.stdout)
        raise OutputError(f"standard output cannot be written: {error.strerror}") from error


def say(line: str) -> None:
    """Write a line for people: to standard error, above a progress bar if there is one; lost if it cannot be written."""
    try:
        if _bars:
            _bars[-1].console.print(line, highlight=False, markup=False)
        elif sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def keep_encodable() -> None:
    """Write characters that the encoding of standard output lacks as escapes, instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def keep_closed() -> None:
    """Keep standard descriptors that are closed from being given to the next file or connection."""
    while (spare := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
        os.set_inheritable(spare, True)
    os.close(spare)


def _give_up(stream: Any) -> None:
    """Lose what a stream still holds: writing it at the end of the process would fail again."""
    with suppress(OSError, ValueError):
        spare = os.open(os.devnull, os.O_WRONLY)
        os.dup2(spare, stream.fileno())
        os.close(spare)


def _is_unicode(stream: Any) -> bool:
    return (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


class LogLines(logging.Handler):
    """Shows log records as `say` shows lines, so that they do not tear a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


class Lasting(logging.Filter):
    """Hides what a client library logs, except critical errors, and errors that it repeats for 15 seconds.

    Such a library retries, and most of its errors are over by then. One line a minute is shown of those that last.

    Args:
        name: The library's logger.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._logger = name
        self._began = self._last = self._shown = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show the record."""
        if record.name != self._logger or record.levelno >= logging.CRITICAL:
            return True
        if record.levelno < logging.ERROR:
            return False
        if record.created - self._last > _PATIENCE_SECONDS:
            self._began = record.created
        self._last = record.created
        if record.created - self._began < _PATIENCE_SECONDS or record.created - self._shown < _AGAIN_SECONDS:
            return False
        self._shown = record.created
        return True


def emit(data: Mapping[str, Any]) -> None:
    """Write one JSON line to standard output."""
    write(json.dumps(data, ensure_ascii=not _is_unicode(sys.stdout)))


@contextmanager
def progress(title: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
    """Show progress on standard error until the block ends.

    Args:
        title: What is waited for.
        total: Amount of work; None when unknown.
        unit: What is counted.
    """
    with _rich(title, total, unit) if _is_terminal(sys.stderr) else _plain(title, total, unit) as bar:
        yield bar


@contextmanager
def steps(title: str) -> Iterator[Any]:
    """Show work without a measure. Yields a function that shows one line per step; without steps nothing is shown."""
    if not _is_terminal(sys.stderr):
        yield lambda line: say(f"{title}: {line}")
        return
    with _rich(title, None, "", transient=True) as bar:
        yield lambda line: bar(0, None, line)


def table(rows: Iterable[Sequence[object]], columns: Sequence[str], *, left: Sequence[str] = ()) -> None:
    """Write a table to standard output.

    Args:
        rows: One value per column.
        columns: Their headings.
        left: Columns that are text; the others are numbers, to the right.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        shown.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(number(value) for value in row))
    # Without a terminal the width is not limited.
    width = None if _is_terminal(sys.stdout) else 10_000
    text = io.StringIO()
    Console(width=width, highlight=False, markup=False, file=text).print(shown)
    lines = text.getvalue() if _is_unicode(sys.stdout) else text.getvalue().replace("─", "-")
    write("\n".join(line.rstrip() for line in lines.splitlines()))


def counted(count: int, one: str, several: str = "") -> str:
    """A number with its noun: `1 batch`, `2 batches`."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def number(value: object) -> str:
    """A value as text for people: integers with separators, lists and objects as JSON that is cut, empty for None.

    Characters that would move the cursor, such as tabs and ends of lines, are escaped.
    """
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, dict | list):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(value))


_bars: list[Any] = []


@contextmanager
def _rich(title: str, total: int | None, unit: str, *, transient: bool = False) -> Iterator[Bar]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    counted = TextColumn("{task.fields[counted]}")
    shown = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), counted, TimeElapsedColumn())
    with Progress(*shown, console=Console(stderr=True), transient=transient) as bars:
        task = bars.add_task(title, total=total, counted="")

        def update(done: int, total: int | None = total, note: str = "") -> None:
            bars.update(task, completed=done, total=total, counted=note or _counted(done, total, unit))

        _bars.append(bars)
        try:
            yield update
        finally:
            _bars.pop()


@contextmanager
def _plain(title: str, total: int | None, unit: str) -> Iterator[Bar]:
    began = spoken = time.monotonic()
    last = ""

    def update(done: int, total: int | None = total, note: str = "") -> None:
        nonlocal spoken, last
        last = note or _counted(done, total, unit)
        if time.monotonic() - spoken >= _LINE_SECONDS:
            spoken = time.monotonic()
            say(f"{title}: {last}")

    yield update
    say(f"{title}: {last + ', ' if last else ''}{time.monotonic() - began:.1f} s")


def _counted(done: int, total: int | None, unit: str) -> str:
    of = f" of {total:,}" if total is not None else ""
    return f"{done:,}{of} {unit}".rstrip()

"""What a person sees: progress where there is a terminal, plain lines where there is none, JSON on request."""

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

_LINE_SECONDS: Final = 5.0
"""Between two plain lines of one progress."""


class Bar(Protocol):
    """Something that a person waits for."""

    def __call__(self, done: int, total: int | None = ..., note: str = ...) -> None:
        """Say how far it is; `total` stays what it was when it is not given."""


def say(line: str) -> None:
    """Write a line for people: to standard error, above a progress bar if there is one."""
    if _bars:
        _bars[-1].console.print(line, highlight=False, markup=False)
    else:
        print(line, file=sys.stderr, flush=True)


class LogLines(logging.Handler):
    """Shows log records as `say` shows lines, so that they do not tear a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def emit(data: Mapping[str, Any]) -> None:
    """Write one JSON line to standard output, at once: another program may be waiting for it."""
    print(json.dumps(data, ensure_ascii=False), flush=True)


@contextmanager
def progress(title: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
    """Show progress on standard error until the block ends.

    Args:
        title: What is waited for.
        total: How much there is to do; None when nobody knows.
        unit: What is counted.
    """
    with _rich(title, total, unit) if sys.stderr.isatty() else _plain(title, total, unit) as bar:
        yield bar


@contextmanager
def steps(title: str) -> Iterator[Any]:
    """Show a thing without a measure; what is yielded takes a line for each step of it. Without steps nothing is said."""
    if not sys.stderr.isatty():
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
    # Without a terminal there is no width to keep to.
    width = None if sys.stdout.isatty() else 10_000
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def number(value: object) -> str:
    """A value as people read it: integers with separators, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


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

"""States as files: JSON lines and Parquet. A file appears when it is complete."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from jobs.environment import UsageError
from jobs.views import States

_ROWS: Final = 50_000
"""Rows of a row group in Parquet, a few megabytes."""


def write_json(states: States, path: Path, progress: Callable[[int], Any]) -> int:
    """Write states as JSON lines, and return how many.

    Args:
        states: The states.
        path: The file; an existing one is replaced.
        progress: Is called with the number of states written so far.
    """
    count = 0
    with _complete(path) as file:
        for count, view in enumerate(states, start=1):
            file.write(json.dumps(view.as_json(), ensure_ascii=False).encode() + b"\n")
            if not count % _ROWS:
                progress(count)
    progress(count)
    return count


def write_parquet(states: States, path: Path, progress: Callable[[int], Any]) -> int:
    """Write states as Parquet, and return how many; see `write_json`.

    Raises:
        DefinitionChangedError: A state of an earlier definition does not fit the columns.
    """
    import pyarrow as pa
    from pyarrow import parquet

    from jobs.table.arrow import arrow_schema

    schema = arrow_schema(states.schema)
    count, held = 0, []
    with _complete(path) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in states.batches():
            held.append(batch)
            count += batch.num_rows
            if sum(one.num_rows for one in held) >= _ROWS:
                writer.write_table(pa.Table.from_batches(held))
                held = []
                progress(count)
        writer.write_table(pa.Table.from_batches(held, schema))
    progress(count)
    return count


@contextmanager
def _complete(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block ends. A pipe or a device is written directly."""
    if path.exists() and not path.is_file():
        with _opened(path, path) as file:
            yield file
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    made = _opened(part, path)
    try:
        with made as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _opened(path: Path, named: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise UsageError(f"{named} cannot be written: {error.strerror}; choose another file") from error

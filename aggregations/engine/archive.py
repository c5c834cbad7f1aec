"""An archive of topics in Parquet, from which records are read that Kafka may no longer have.

An archive is a copy of topics with their coordinates: rows with the columns of Spark's Kafka source, in any order, in any
number of files. Where it reaches back further than Kafka's log, the log of a partition begins with the archive's first
record. Up to the archive's end records are read from it, also those that Kafka still has: retention then deletes nothing
that a long fold has yet to read. From there on they are read from Kafka.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from aggregations.definition.element import Record
from aggregations.engine.delivered_rows import chunked, columns, converted, in_order, of_partition
from aggregations.engine.fetch import CHUNK_RECORDS
from aggregations.engine.options import PARQUET
from aggregations.engine.ranges import Range
from aggregations.errors import RunRefusedError
from envelope import TopicPartition
from persistence.kafka.facts import Watermarks

if TYPE_CHECKING:
    from pyarrow.dataset import ParquetFileFragment
    from pyarrow.fs import FileSystem

_COORDINATES: Final = ("topic", "partition", "offset", "timestamp")
_DIRECTORIES: Final = {"topic": pa.string(), "partition": pa.int32()}
"""Columns that a directory may stand for, as in `topic=orders/partition=0`, with their types."""
_WILD: Final = "*?["
_OF_TABLE: Final = re.compile(r"/(_delta_log|[.]hoodie)(/|$)|[.]metadata[.]json$")
"""Files of a Delta, Hudi or Iceberg table."""

Run = tuple[int, int]
"""Offsets without a hole: first, and end after the last."""
Fetch = Callable[[Sequence[Range]], Iterator[pa.Table]]
"""Reads ranges from Kafka, as `Fetcher.read` does."""


_BINARY: Final = (pa.binary(), pa.large_binary(), pa.null())  # null: the type of a column without any value
_TEXT: Final = (pa.string(), pa.large_string())


def _is_text(kind: pa.DataType) -> bool:
    return bool((kind.value_type if types.is_dictionary(kind) else kind) in _TEXT)


def _is_headers(kind: pa.DataType) -> bool:
    item = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else None
    if item is None or not types.is_struct(item) or [one.name for one in item] != ["key", "value"]:
        return bool(kind == pa.null())
    return bool(item.field("key").type in _TEXT and item.field("value").type in _BINARY)


_FITS: Final[Mapping[str, Callable[[pa.DataType], bool]]] = {
    "key": _BINARY.__contains__,
    "value": _BINARY.__contains__,
    "topic": _is_text,
    "partition": types.is_int32,
    "offset": types.is_int64,
    "timestamp": types.is_timestamp,
    "headers": _is_headers,
}
"""Whether a column in a file has a type that fits."""


class Piece(NamedTuple):
    """The records of one partition in one row group.

    Attributes:
        first: First offset.
        end: Offset after the last one.
        group: The row group.
    """

    first: int
    end: int
    group: "ParquetFileFragment"


@dataclass(frozen=True, slots=True)
class Archive:
    """What an archive has of a flow's topics. It can be pickled, and read where its location is reachable.

    Attributes:
        location: Its location, for errors.
        pieces: Where the records of a partition are, in order of first offsets.
        runs: The offsets of a partition, in order.
        headers: Read headers, too.
        has_headers: All files have headers.
        until: Offset from which a partition is read from Kafka; 0 for one that Kafka has from an earlier offset on.
    """

    location: str
    pieces: Mapping[TopicPartition, Sequence[Piece]]
    runs: Mapping[TopicPartition, Sequence[Run]]
    headers: bool = False
    has_headers: bool = False
    until: Mapping[TopicPartition, int] = field(default_factory=dict)

    def beside(self, marks: Mapping[TopicPartition, Watermarks]) -> "Archive":
        """The archive, with what is read from it: up to its end, or to its first hole that Kafka can fill."""
        until = {}
        for place, runs in self.runs.items():
            low = marks[place].low if place in marks else 0
            if runs[0][0] <= low:
                until[place] = next((end for first, end in runs if first <= low <= end), low)
        return replace(self, until=until)

    def low(self, place: TopicPartition, low: int) -> int:
        """First offset of a partition in the archive and Kafka together.

        Args:
            place: The partition.
            low: First offset that Kafka has.
        """
        return min(low, self.runs[place][0][0]) if self.until.get(place) else low

    def missing(self, place: TopicPartition, start: int, end: int) -> list[Run]:
        """Offsets of a range that are to be read from the archive, and are not in it."""
        last, at = min(end, self.until.get(place, 0)), start
        holes = []
        for first, behind in (*self.runs.get(place, ()), (last, last)):
            if at < min(first, last):
                holes.append((at, min(first, last)))
            at = max(at, behind)
        return holes

    def count(self, place: TopicPartition, start: int, end: int) -> int:
        """Number of records of a range that are read from the archive."""
        last = min(end, self.until.get(place, 0))
        return sum(max(min(behind, last) - max(first, start), 0) for first, behind in self.runs.get(place, ()))

    def first_at(self, place: TopicPartition, time_ms: int) -> int | None:
        """The first offset that is read from the archive, and has this timestamp or a later one."""
        found = until = self.until.get(place, 0)
        for piece in self.pieces.get(place, ()):
            if piece.first >= found:
                break
            table = self._load(piece, place, 0, found, "offset", "timestamp")
            late = pc.greater_equal(table.column("timestamp").cast(pa.int64()), time_ms)
            offsets = table.column("offset").filter(late)
            found = pc.min(offsets).as_py() if len(offsets) else found
        return found if found < until else None

    def read(self, ranges: Sequence[Range], fetch: Fetch) -> Iterator[pa.Table]:
        """Read ranges of one topic: what is to be read from the archive first, then the rest from Kafka.

        Args:
            ranges: The ranges.
            fetch: Reads from Kafka.

        Yields:
            Records, as `Fetcher.read` does.

        Raises:
            RunRefusedError: The archive was changed or deleted.
        """
        left = []
        for one in ranges:
            border = min(max(one.start, self.until.get(one.place, 0)), one.end)
            if one.start < border:
                yield from self.records(one.place, one.start, border)
            if border < one.end:
                left.append(one._replace(start=border))
        if left:
            yield from fetch(left)

    def chosen(self, place: TopicPartition, offsets: Collection[int]) -> Iterator[Record]:
        """Single records of the archive, in order, with their headers if the archive has them."""
        whole, wanted = replace(self, headers=self.has_headers), pa.array(sorted(offsets), pa.int64())
        for table in whole.records(place, min(offsets), max(offsets) + 1):
            found = table.filter(pc.is_in(table.column("offset"), wanted))
            times = found.column("timestamp").cast(pa.int64()).to_pylist()
            for row, at in zip(found.drop_columns(["timestamp"]).to_pylist(), times, strict=True):
                headers = tuple((one["key"], one["value"]) for one in row.get("headers", ()))
                yield Record(*place, row["offset"], row["key"], row["value"], at, headers)

    def records(self, place: TopicPartition, start: int, end: int) -> Iterator[pa.Table]:
        """The archive's records of a range in order, each offset once. Row groups that overlap are in memory together.

        Raises:
            RunRefusedError: Two records of one offset differ, or the archive was changed or deleted.
        """
        pieces = [one for one in self.pieces.get(place, ()) if one.first < end and start < one.end]
        waiting = None
        for number, piece in enumerate(pieces):
            table = self._load(piece, place, start, end, "key", "value", "offset", "timestamp", "headers")
            waiting = table if waiting is None else pa.concat_tables([waiting, table])
            border = pieces[number + 1].first if number + 1 < len(pieces) else end
            ready = pc.less(waiting.column("offset"), border)
            if border == end or 2 * (pc.sum(ready).as_py() or 0) >= CHUNK_RECORDS:
                yield from self._chunks(place, waiting.filter(ready))
                waiting = waiting.filter(pc.invert(ready))

    def _load(self, piece: Piece, place: TopicPartition, start: int, end: int, *columns: str) -> pa.Table:
        """The records of a range in a row group, with the columns and types of `Fetcher.read`."""
        inside = (pc.field("offset") >= start) & (pc.field("offset") < end)
        here = (pc.field("topic") == place.topic) & (pc.field("partition") == place.partition)
        names = [one for one in columns if self.headers or one != "headers"]
        try:
            schema = _schema(piece.group, headers=self.headers)
            table = piece.group.to_table(schema=schema, columns=names, filter=here & inside)
        except (OSError, pa.ArrowException) as error:
            raise unreadable(self.location, error) from error
        return pa.table([converted(name, table.column(name)) for name in names], names=names)

    def _chunks(self, place: TopicPartition, table: pa.Table) -> Iterator[pa.Table]:
        table, differ = in_order(table)
        if differ:
            raise contradicted(self.location, place, differ[0], "has two different records")
        return (of_partition(part, place) for part in chunked(table))


def contradicted(location: str, place: TopicPartition, offset: int, what: str) -> RunRefusedError:
    """The error for two records at one place."""
    return RunRefusedError(
        f"{location} {what} at {place.topic}:{place.partition}:{offset}: they are of two topics of that name, or of two "
        "clusters. Give an archive of this topic alone"
    )


def unreadable(location: str, error: Exception) -> RunRefusedError:
    """The error for files that Arrow cannot read."""
    return RunRefusedError(f"{location} cannot be read: {str(error).splitlines()[0]}. Give Parquet files (--history)")


def open_archive(location: str, topics: Collection[str], *, headers: bool) -> Archive:
    """Find what an archive has of some topics, and check its rows. Rows of other topics are passed over.

    The coordinates of all rows are read, and the records of a partition that has an offset twice.

    Args:
        location: `parquet:` and a path: a file, a directory or a glob, of this machine or as a URI that Arrow knows.
        topics: The topics.
        headers: Their headers are read, too.

    Raises:
        RunRefusedError: It does not exist or cannot be read, lacks a column, has one of another type, a row without
            coordinates, or two different records at one offset.
    """
    try:
        if not (files := _files(location)):
            raise RunRefusedError(
                f"{location}: there is no Parquet file. Give a file, a directory or a glob (--history)"
            )
        return _opened(location, files, tuple(sorted(topics)), headers)
    except (OSError, pa.ArrowException) as error:
        raise unreadable(location, error) from error


def _path(location: str) -> tuple["FileSystem", str]:
    from pyarrow.fs import FileSystem, LocalFileSystem

    path = location.removeprefix(PARQUET)
    return FileSystem.from_uri(path) if "://" in path else (LocalFileSystem(), os.path.abspath(path))


def _files(location: str) -> tuple[tuple[Any, ...], ...]:
    """Path, size and time of every file."""
    from pyarrow.fs import FileSelector, FileType

    system, path = _path(location)
    info, glob = system.get_file_info(path), ""
    if info.type == FileType.NotFound and (wild := [at for at, letter in enumerate(path) if letter in _WILD]):
        path, glob = path[: wild[0]].rpartition("/")[0] or "/", path
        info = system.get_file_info(path)
    found = [info] if info.is_file else []
    if info.type == FileType.Directory:
        every = system.get_file_info(FileSelector(path, recursive=True))
        if versioned := [one.path for one in every if _OF_TABLE.search(one.path[len(path) :])]:
            raise RunRefusedError(
                f"{location} is a table with versions ({versioned[0]}): its directory has files that the table no longer has. "
                "Read it with Spark, and fold that with Aggregator.fold, or write it as plain Parquet"
            )
        # As for Spark, other names are of files that are being written.
        shown = [one for one in every if not any(part[:1] in "._" for part in one.path[len(path) :].split("/") if part)]
        matching = [one for one in shown if fnmatchcase(one.path, glob) or fnmatchcase(one.path, f"{glob}/*")]
        found = [one for one in (matching if glob else shown) if one.is_file and one.path.endswith(".parquet")]
    return tuple(sorted((one.path, one.size, one.mtime_ns) for one in found))


@lru_cache(maxsize=4)  # one command opens several runs
def _opened(location: str, files: Sequence[tuple[Any, ...]], topics: Sequence[str], headers: bool) -> Archive:
    import pyarrow.dataset as ds

    pieces: dict[TopicPartition, list[Piece]] = {}
    runs: dict[TopicPartition, list[Run]] = {}
    rows: dict[TopicPartition, int] = {}
    has_headers = True
    system, _ = _path(location)
    for path, *_ in files:
        file = ds.ParquetFileFormat().make_fragment(path, system, _directories(path))
        _check_columns(f"{PARQUET}{file.path}", _schema(file, headers=True), headers=headers)
        has_headers &= "headers" in file.physical_schema.names
        for group in file.split_by_row_group():
            table = group.to_table(schema=_schema(group, headers=headers), columns=[*_COORDINATES])
            if empty := [name for name in _COORDINATES if table.column(name).null_count]:
                raise RunRefusedError(
                    f"{PARQUET}{file.path}: rows have no {empty[0]}: without it they are no records of a topic; remove them"
                )
            for name in ("partition", "offset"):
                if (pc.min(table.column(name)).as_py() or 0) < 0:
                    raise RunRefusedError(
                        f"{PARQUET}{file.path}: rows have a negative {name}, so they are no records of a topic; remove them"
                    )
            for place, offsets in _by_place(table, topics):
                its = _runs(offsets)
                pieces.setdefault(place, []).append(Piece(its[0][0], its[-1][1], group))
                runs[place] = _merged([*runs.get(place, ()), *its])
                rows[place] = rows.get(place, 0) + len(offsets)
    ordered = {place: tuple(sorted(its, key=lambda one: one[:2])) for place, its in pieces.items()}
    archive = Archive(location, ordered, runs, headers, has_headers)
    for place, its in runs.items():
        if rows[place] > sum(end - first for first, end in its):
            for _ in replace(archive, headers=has_headers).records(place, its[0][0], its[-1][1]):
                pass
    return archive


def _directories(path: str) -> Any:
    """What the directories of a path say of its records, with fixed types: Arrow would take the topic "007" for a number."""
    import pyarrow.dataset as ds

    found = ds.scalar(True)
    for name, kind in _DIRECTORIES.items():
        for part in path.split("/")[:-1]:
            if part.startswith(f"{name}="):
                found &= ds.field(name) == pa.scalar(unquote(part.partition("=")[2])).cast(kind)
    return found


def _schema(fragment: "ParquetFileFragment", *, headers: bool) -> pa.Schema:
    """The columns of a file, with those that its directories stand for."""
    import pyarrow.dataset as ds

    inside, outside = fragment.physical_schema, ds.get_partition_keys(fragment.partition_expression)
    fields = [
        pa.field(name, kind) for name, kind in _DIRECTORIES.items() if name in outside and name not in inside.names
    ]
    names = [name for name in columns(headers=headers) if name in inside.names]
    return pa.schema([*map(inside.field, names), *fields])


def _check_columns(path: str, schema: pa.Schema, *, headers: bool) -> None:
    needed = columns(headers=headers)
    if missing := [name for name in needed if name not in schema.names]:
        more = "; write it with includeHeaders, because the flow reads headers" if missing == ["headers"] else ""
        raise RunRefusedError(
            f"{path} has no column {missing[0]!r}; an archive needs the columns of Spark's Kafka source: {', '.join(needed)}{more}"
        )
    for column in schema:
        if not _FITS[column.name](column.type):
            raise RunRefusedError(
                f"{path}: column {column.name!r} is {column.type}; it must be {columns(headers=True)[column.name]}, so cast it"
            )


def _by_place(table: pa.Table, topics: Iterable[str]) -> Iterator[tuple[TopicPartition, pa.ChunkedArray]]:
    """The offsets of each partition of these topics."""
    for topic in topics:
        mine = table.filter(pc.equal(table.column("topic"), topic))
        for partition in pc.unique(mine.column("partition")).to_pylist():
            yield TopicPartition(topic, partition), mine.filter(pc.field("partition") == partition).column("offset")


def _runs(offsets: pa.ChunkedArray) -> list[Run]:
    sorted_once = pc.unique(offsets).sort()
    if len(sorted_once) == 1:
        ends = pa.array([], pa.uint64())
    else:
        ends = pc.indices_nonzero(pc.greater(pc.subtract(sorted_once[1:], sorted_once[:-1]), 1))
    last = [*sorted_once.take(ends).to_pylist(), sorted_once[-1].as_py()]
    first = [sorted_once[0].as_py(), *sorted_once.take(pc.add(ends, pa.scalar(1, pa.uint64()))).to_pylist()]
    return [(one, other + 1) for one, other in zip(first, last, strict=True)]


def _merged(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for first, end in sorted(runs):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found

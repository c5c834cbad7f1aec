"""States that a stage holds: one by one, and as a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from heapq import nsmallest
from itertools import chain, compress, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import polars as pl

from aggregations.definition.flow import Flow, Stage
from aggregations.definition.windows import Window
from aggregations.errors import FlowError
from aggregations.run.border import check_whole
from aggregations.run.live import live_generation
from jobs.table.columns import Columns
from jobs.table.selection import Selection, condition, matching
from jobs.table.view import View, key_as_json, views_of
from persistence.names import FlowRef, StageRef, check_generation
from persistence.protocol import StateStore, Stored
from persistence.registry import open_store

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["States", "View", "key_as_json", "states"]

_PART: Final = 1000
"""States that are decoded and selected together, and at most the rows of a record batch."""


@dataclass(frozen=True, slots=True)
class States(Iterable[View]):
    """States of a stage, read from its store whenever they are iterated or asked for as a table.

    The order is that of the bytes of the keys if the store keeps keys in order, or if `limit` is given.
    Nothing is locked: a running job continues. Each state is one that its store had at some moment of the read, whole,
    and a state that exists during the whole read is returned once. States of different keys may be of different batches.

    Attributes:
        stage: The stage.
        ref: Identity of its states.
        url: URL of its store.
        selection: Which of them.
        columns: Their columns as a table.
    """

    stage: Stage
    ref: StageRef
    url: str
    selection: Selection
    columns: Columns

    def __iter__(self) -> Iterator[View]:
        """One state after the other, in bounded memory."""
        return chain.from_iterable(self._parts())

    @property
    def schema(self) -> pl.Schema:
        """Columns of `frame` and `batches`: `_key`, the fields of the fold, then what the store knows of each state."""
        return self.columns.schema

    def frame(self) -> pl.DataFrame:
        """All of the states as one polars frame.

        Raises:
            DefinitionChangedError: A state of an earlier definition does not fit the columns.
        """
        parts = [self.columns.frame(part) for part in self._parts()]
        return pl.concat(parts) if parts else pl.DataFrame(schema=self.schema)

    def batches(self) -> "Iterator[pa.RecordBatch]":
        """The states as Arrow record batches of up to 1,000 rows, in bounded memory; see `schema`.

        Raises:
            DefinitionChangedError: A state of an earlier definition does not fit the columns.
        """
        from jobs.table.arrow import batch_of

        return (batch_of(self.columns.frame(part)) for part in self._parts())

    def _parts(self) -> Iterator[list[View]]:
        """The selected states in parts; none is empty."""
        with closing(open_store(self.url)) as store:
            if not store.capabilities.shared:
                raise FlowError(
                    f"the store of stage {self.stage.name} is in the memory of one process: give another one with --store URL"
                )
            found, limit = self._found(store), self.selection.limit
            parts = (matched for part in _parted(found, _PART) if (matched := self._matching(part)))
            if limit is None:
                yield from parts
            elif store.capabilities.ordered_scan and self.selection.keys is None:
                yield from _parted(islice(chain.from_iterable(parts), limit), _PART)
            else:
                order = attrgetter("key" if self.stage.aggregate.sessions is None else "session_order")
                lowest = nsmallest(limit, chain.from_iterable(parts), key=order)
                yield from _parted(iter(lowest), _PART)

    def _found(self, store: StateStore) -> Iterator[View]:
        """The states in the range of keys."""
        which, aggregate = self.selection, self.stage.aggregate
        window = aggregate.window if isinstance(aggregate.window, Window) else None
        if which.keys is not None and (window is None or which.start is not None):
            keys = which.keys
            if window is not None and which.start is not None:
                keys = [window.key_at(key, which.start) for key in keys]
            found = iter(store.load(self.ref, [key for key in keys if which.contains(key)]).items())
        elif window is None:
            found = store.scan(self.ref, bucket=which.bucket, begin=which.begin, end=which.end)
        else:
            found = self._in_windows(store, window)
        manifest = store.load_manifest(self.ref.flow_ref)  # before the states: what is written later has no time
        check_whole(self.ref.flow_ref, [(self.stage.name, manifest)])
        times = manifest.times if manifest else ()
        views = (view for key, stored in found for view in views_of(self.stage, self.ref, key, stored, times))
        recent = filter(which.of_age, views)
        return recent if aggregate.sessions is None else filter(which.has_session, recent)

    def _in_windows(self, store: StateStore, window: Window) -> Iterator[tuple[bytes, Stored]]:
        """The states of some windows of some keys."""
        which = self.selection
        begin, end, keys = which.begin, which.end, None if which.keys is None else frozenset(which.keys)
        if keys is not None:
            if not keys:
                return
            begin = max(begin, min(key + b"@" for key in keys))
            highest = max(key + b"A" for key in keys)  # the byte after @
            end = highest if end is None else min(end, highest)
        tail = b"" if which.start is None else window.key_at(b"", which.start)
        for key, stored in store.scan(self.ref, bucket=which.bucket, begin=begin, end=end):
            if key.endswith(tail) and (keys is None or window.stage_key(key) in keys):
                yield key, stored

    def _matching(self, part: list[View]) -> list[View]:
        """The states for which the condition is true."""
        where = self.selection.where
        return part if where is None else [*compress(part, matching(where, self.columns.frame(part)))]


def states(
    flow: Flow[Any],
    stage: str,
    stores: Mapping[str, str],
    *,
    generation: int | None = None,
    keys: Sequence[bytes] | None = None,
    start: datetime | None = None,
    prefix: bytes = b"",
    after: bytes | None = None,
    where: str | pl.Expr | None = None,
    older_than_ms: int | None = None,
    newer_than_ms: int | None = None,
    limit: int | None = None,
    histories: bool = False,
) -> States:
    """Read states of a stage: all of them, or some.

    Args:
        flow: The flow.
        stage: Name of the stage.
        stores: URL of the store by stage name, from `bind`.
        generation: Generation of the states; None for the live one.
        keys: Keys of the stage to read, all windows of each; keys without a state are left out.
        start: Only the window that starts at this time, which has a time zone.
        prefix: Only keys that begin with these bytes.
        after: Only keys above this one, in the order of their bytes: the last key of the page before.
        where: Only states for which this is true: SQL such as `"late > 100 AND _version > 1"`, or a polars expression,
            over the columns of `States.schema`.
        older_than_ms: Only states that were written before this time, in milliseconds since 1970. States have no time
            of their own; see `View.written_by_ms`.
        newer_than_ms: Only states that may have been written since this time: those that are not older.
        limit: Only this many, those with the lowest keys. A store that does not keep keys in order is read whole.
        histories: Whether the table has the positions that each state holds.

    Raises:
        FlowError: The stage or a column does not exist, the condition is invalid, the store is in the memory of one
            process, or the stage has no window that starts at `start`.
        Corrupt: A state cannot be read.
        DefinitionChangedError: A state of an earlier definition does not have the shape of the stage's states.
        RunRefusedError: A snapshot is being restored into the store, or this was interrupted.
    """
    found = flow.stage(stage)
    live = live_generation(flow, stores) if generation is None else generation
    ref = FlowRef(flow.name, check_generation(flow.name, live)).stage(stage)
    columns = Columns.of_stage(found, str(ref), histories=histories)
    chosen = None if where is None else condition(where, columns.schema)
    window = found.aggregate.window
    if start is not None:
        if window is None:
            raise FlowError(f"stage {stage} has no windows")
        window.key_at(b"", start)  # a window starts there
    past = None if after is None or found.aggregate.sessions is None else found.aggregate.sessions.find(after)
    selection = Selection(keys, prefix, after, chosen, older_than_ms, newer_than_ms, limit, start=start, past=past)
    return States(found, ref, stores[stage], selection, columns)


def _parted(found: Iterator[View], size: int) -> Iterator[list[View]]:
    while part := [*islice(found, size)]:
        yield part

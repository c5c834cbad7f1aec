"""Event times and windows of whole columns: what `aggregations.per_message.times` does message by message."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import polars as pl

from aggregations.columns import schema
from aggregations.columns.arrays import NEVER, Ints
from aggregations.columns.steps import Stepped, evaluate_columns, numbered
from aggregations.definition.expiry import Expiry
from aggregations.definition.expressions import expression
from aggregations.definition.sessions import SessionWindow
from aggregations.definition.source import Topic
from aggregations.definition.times import EARLIEST_US, LATEST_US, MICROS, NO_TIME
from aggregations.definition.windows import Window, start_bytes
from aggregations.per_message.cause import Cause
from aggregations.per_message.times import Times
from envelope import Reason, TopicPartition

_NO_TIME: Final = Cause(Reason.BAD_EVENT_TIME, NO_TIME)


class InWindows(NamedTuple):
    """Where the rows of a windowed stage belong.

    Attributes:
        user_key: The stage's key, Binary.
        key: Key of the state, Binary.
        closed: Whether the window is closed for the row, Boolean.
    """

    user_key: pl.Series
    key: pl.Series
    closed: pl.Series


def with_times(frame: pl.DataFrame, topic: Topic, read: Mapping[TopicPartition, int]) -> tuple[pl.DataFrame, Times]:
    """Check the event times of rows, and note the latest event time before each.

    Args:
        frame: Rows of the source, with `_time`, in order of offsets within each partition.
        topic: The source.
        read: Latest event time by topic and partition before the first of them.

    Returns:
        The rows with `_time` (Int64, null where it is not valid), `_before` (Int64, null) and `_event_time_us`, and the
        latest event times after the last of them, of their partitions.
    """
    given = frame.get_column(schema.TIME) if topic.time is None else _declared(frame, topic)
    stamp = frame.get_column(schema.TIMESTAMP).clip(EARLIEST_US // 1_000, LATEST_US // 1_000)
    valid = given.is_between(EARLIEST_US, LATEST_US) & (given <= stamp * 1_000 + topic.ahead_seconds * MICROS)
    time = pl.select(pl.when(valid).then(given)).to_series().alias(schema.TIME)
    times, partitions = time.fill_null(NEVER).to_numpy(), frame.get_column(schema.PARTITION).to_numpy()
    before, after = np.empty(len(times), np.int64), Times()
    for partition in np.unique(partitions).tolist():
        place = TopicPartition(topic.name, partition)
        rows = np.flatnonzero(partitions == partition)
        reached = np.maximum.accumulate(np.concatenate(([read.get(place, NEVER)], times[rows])))
        before[rows] = reached[:-1]
        if reached[-1] != NEVER:
            after[place] = int(reached[-1])
    noted = pl.Series(schema.BEFORE, before)
    event_time = pl.coalesce(pl.col(schema.TIME), pl.col(schema.EVENT_TIME)).alias(schema.EVENT_TIME)
    return frame.with_columns(time, pl.select(pl.when(noted != NEVER).then(noted)).to_series()).with_columns(
        event_time
    ), after


def enter_windows(
    stepped: Stepped, keys: pl.Series, window: Window | SessionWindow, removed: int | None = None
) -> InWindows:
    """Put each row into its windows: it is replaced by one row for each, in order of time.

    Args:
        stepped: The rows; those without a valid event time are rejected.
        keys: The stage's key of each, Binary.
        window: The stage's windows.
        removed: Due time up to which states of the stage have left the store, in seconds since 1970.
    """
    missing = stepped.frame.get_column(schema.TIME).is_null().to_numpy()
    kept = stepped.reject(missing.astype(np.uint8), [_NO_TIME])
    keys = keys if kept.all() else keys.filter(pl.Series(kept))
    times: Ints = stepped.frame.get_column(schema.TIME).to_numpy()
    if isinstance(window, SessionWindow):
        late = _reached(stepped.frame, times + (window.gap + window.lateness) * MICROS + 1)
        return InWindows(keys, keys, late if removed is None else late | pl.Series(times < removed * MICROS))
    starts = times // MICROS // window.slide * window.slide
    if window.each > 1:
        rows = np.repeat(np.arange(len(times)), window.each)
        back = np.arange(window.slide - window.size, window.slide, window.slide)
        starts = (starts[:, np.newaxis] + back).reshape(-1)
        stepped.frame = numbered(stepped.frame[rows], np.full(len(times), window.each, np.int64))
        keys = keys[rows]
    different, codes = np.unique(starts, return_inverse=True)
    ends = pl.Series([start_bytes(start) for start in different.tolist()], dtype=pl.Binary).gather(codes)
    closes = (starts + window.size + window.lateness) * MICROS
    closed = _reached(stepped.frame, closes)
    if removed is not None:
        closed |= pl.Series(starts + window.size <= removed)
    return InWindows(keys, keys + ends, closed)


def _reached(frame: pl.DataFrame, times: Ints) -> pl.Series:
    """Whether the log of each row's partition has reached a time before it."""
    return (pl.Series(times) <= frame.get_column(schema.BEFORE)).fill_null(value=False)


def enter_times(
    stepped: Stepped, keys: pl.Series, times: Window | SessionWindow | Expiry, removed: int | None
) -> InWindows:
    """Bring rows to a stage that decides by event times; see `enter_windows` and `enter_expiring`."""
    if isinstance(times, Expiry):
        return enter_expiring(stepped, keys, times, removed)
    return enter_windows(stepped, keys, times, removed)


def enter_expiring(stepped: Stepped, keys: pl.Series, expiry: Expiry, removed: int | None = None) -> InWindows:
    """Find the rows that come too late for a stage whose states expire.

    Args:
        stepped: The rows; those without a valid event time are rejected.
        keys: The stage's key of each, Binary.
        expiry: When states expire.
        removed: Due time up to which states of the stage have left the store, in seconds since 1970.
    """
    missing = stepped.frame.get_column(schema.TIME).is_null().to_numpy()
    kept = stepped.reject(missing.astype(np.uint8), [_NO_TIME])
    keys = keys if kept.all() else keys.filter(pl.Series(kept))
    times = stepped.frame.get_column(schema.TIME)
    late = (times + expiry.seconds * MICROS <= stepped.frame.get_column(schema.BEFORE)).fill_null(value=False)
    return InWindows(keys, keys, late if removed is None else late | (times <= removed * MICROS))


def _declared(frame: pl.DataFrame, topic: Topic) -> pl.Series:
    """The times that the topic's expression gives; null where it cannot be evaluated, or is far from any valid time."""
    assert topic.time is not None
    found, failed = evaluate_columns(frame, {schema.TIME: expression(topic.time)})
    times = found.get_column(schema.TIME).cast(pl.Int64, strict=False)
    near = times.is_between(EARLIEST_US // 1_000, LATEST_US // 1_000) & pl.Series(failed == 0)
    return pl.select(pl.when(near).then(times * 1_000)).to_series()

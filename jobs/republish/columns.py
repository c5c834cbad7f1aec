"""Delivered messages as columns: those that the fast path may forward, and what it made of them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from jobs.republish.partition import Consumed
from persistence.kafka.array_producer import Spans, spans_of
from persistence.kafka.headers import have_headers

if TYPE_CHECKING:
    from jobs.republish.input import Input

At: TypeAlias = tuple[str, int, int | None]
"""Topic, partition and leader epoch of a message."""
Ints: TypeAlias = npt.NDArray[np.int64]

_LEAST_MESSAGES: Final = 4
"""In a run, on average, to be worth its calls; with fewer, messages are handled one by one."""


class Columns(NamedTuple):
    """Messages that have a value and no headers, and whose key is not empty.

    Attributes:
        rows: Place of each among the delivered messages, ascending.
        at: Topics, partitions and leader epochs.
        codes: Number of each message's in `at`.
        offsets: Offsets.
        times: Timestamps in milliseconds since 1970; zero or less if there is none.
        values: Values, of messages or to produce.
        keys: Keys.
    """

    rows: Ints
    at: Sequence[At]
    codes: Ints
    offsets: Ints
    times: Ints
    values: Spans
    keys: Spans

    def of(self, wanted: slice | npt.NDArray[np.bool_]) -> Self:
        """Some of them."""
        values, keys = ((data, starts[wanted], sizes[wanted]) for data, starts, sizes in (self.values, self.keys))
        return self._replace(
            rows=self.rows[wanted],
            codes=self.codes[wanted],
            offsets=self.offsets[wanted],
            times=self.times[wanted],
            values=values,
            keys=keys,
        )

    def runs(self, count: int) -> Iterator[Self]:
        """Those that follow each other among `count` delivered messages; none if these are mostly single ones."""
        ends = [*(np.flatnonzero(np.diff(self.rows) != 1) + 1).tolist(), len(self.rows)]
        if len(self.rows) and len(ends) <= 1 + count // _LEAST_MESSAGES:
            for first, end in zip([0, *ends], ends, strict=False):
                yield self.of(slice(first, end))

    def advancing(self, source: "Input") -> Self:
        """Advance each partition past its messages; leave out those of a partition that was revoked or waits."""
        kept = np.ones(len(self.rows), np.bool_)
        numbers: dict[tuple[str, int], int] = {}
        # Of each leader epoch of a partition, the same number.
        group = np.array([numbers.setdefault(one[:2], len(numbers)) for one in self.at], np.int64)[self.codes]
        for place, number in numbers.items():
            mine = np.flatnonzero(group == number)
            if not len(mine):
                continue
            part = source.partitions.get(place)
            if part is None or part.due_ms:
                kept[mine] = False  # they are read again
                continue
            offsets = self.offsets[mine]
            gaps = np.flatnonzero(np.diff(offsets) != 1) + 1
            for gap in ([] if offsets[0] == part.next else [0]) + gaps.tolist():
                if gap:
                    part.next = int(offsets[gap - 1]) + 1
                source.jumped(part, int(offsets[gap]))
            part.next, part.leader_epoch = int(offsets[-1]) + 1, self.at[self.codes[mine[-1]]][2]
        return self if kept.all() else self.of(kept)


def columns_of(messages: Sequence[Consumed]) -> Columns:
    """The messages that have a value and no headers, and whose key is not empty, as columns."""
    made = getattr(messages, "columns", None)
    return made() if made else _of_objects(messages)


def _of_objects(messages: Sequence[Consumed]) -> Columns:
    values, keys = [one.value() for one in messages], [one.key() for one in messages]
    headed = have_headers(messages)
    rows = [
        row
        for row, value in enumerate(values)
        if value and keys[row] != b"" and not headed[row] and messages[row].error() is None
    ]
    usual = [messages[row] for row in rows]
    numbers: dict[At, int] = {}
    codes = [numbers.setdefault((one.topic(), one.partition(), one.leader_epoch()), len(numbers)) for one in usual]
    return Columns(
        np.array(rows, np.int64),
        [*numbers],
        np.array(codes, np.int64),
        np.array([one.offset() for one in usual], np.int64),
        np.array([time if kind else 0 for kind, time in [one.timestamp() for one in usual]], np.int64),
        spans_of([values[row] for row in rows]),
        spans_of([keys[row] for row in rows]),
    )

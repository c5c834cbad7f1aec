"""`ProducerFilter` over columns, in compiled code.

A state is left to the pure code if a contiguous producer left a gap, if a record is rejected, or if producers may be
forgotten.
"""

from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.records import StoredStates, Texts
from aggregations.columns.rulings import ACCEPTED, BELOW_FLOOR, DUPLICATE, FENCED, UNIDENTIFIED, Rulings, begins_of
from envelope.filters.arrival import MILLISECOND
from envelope.filters.producers import Producer, ProducerFilter, ProducerState
from persistence.compiled import compiled

_NONE: Final = -1


class _Stamps(NamedTuple):
    """What rows say about their producers.

    Attributes:
        producer: Number of the producer; `_NONE` for a row without a stamp.
        first: First sequence number.
        last: Last sequence number.
        epoch: Epoch.
        contiguous: Whether the producer leaves no gaps.
    """

    producer: Ints
    first: Ints
    last: Ints
    epoch: Ints
    contiguous: Mask

    def between(self, begin: int, end: int) -> "_Stamps":
        """Those of some rows."""
        mine = slice(begin, end)
        return _Stamps(self.producer[mine], self.first[mine], self.last[mine], self.epoch[mine], self.contiguous[mine])


class _Producers(NamedTuple):
    """Producers of a state, by number.

    Attributes:
        known: Whether the state remembers it.
        highest: `Producer.highest`.
        exact_from: `Producer.exact_from`.
        epoch: `Producer.epoch`.
        row: Its latest row that is not fenced; `_NONE` before the first.
    """

    known: Mask
    highest: Ints
    exact_from: Ints
    epoch: Ints
    row: Ints


def judge_producers(rule: ProducerFilter, stamps: pl.Series, times: Ints, codes: Ints, stored: StoredStates) -> Rulings:
    """Judge rows as `ProducerFilter.judge` does.

    Args:
        rule: The filter. It reads the stamps of envelopes.
        stamps: Of type `schema.STAMPS`; null for a row whose producer takes no part.
        times: Times in milliseconds.
        codes: Number of each row's state; the rows of one state together, in the order in which they are judged.
        stored: The states before.
    """
    found = Rulings.of(len(codes), stored)
    names, read = _read(stamps)
    begins, texts = begins_of(codes).tolist(), Texts(found.values)
    for begin, end in zip(begins, [*begins[1:], len(codes)], strict=True):
        code = int(codes[begin])
        state = rule.load(msgspec.json.decode(stored.text(0, code))) if stored.exists[code] else rule.zero()
        mine = read.between(begin, end)
        producers = _producers(names, mine.producer, state)
        if producers is None or not _judge(mine, producers, found.verdicts[begin:end]):
            found.left[code] = True
            continue
        now = np.maximum.accumulate(times[begin:end])
        if state.stream_time_ms is not None:
            now = np.maximum(now, state.stream_time_ms)
        longest = min([int(now[0]), *(one.seen_ms for one in state.producers.values())])
        _update(state, names, producers, now)
        if longest < int(now[-1]) - rule.expiry // MILLISECOND or len(state.producers) > rule.limit:
            found.left[code] = True
            continue
        texts.put(0, code, rule.dump(state))
    found.texts = texts.joined()
    found.forward[:] = (found.verdicts == ACCEPTED) | (found.verdicts == UNIDENTIFIED)
    return found


def _read(stamps: pl.Series) -> tuple[list[str], _Stamps]:
    """The names of producers, and the stamps."""
    fields = stamps.struct.unnest()
    named = fields.get_column("producer").to_arrow(compat_level=pl.CompatLevel.oldest()).dictionary_encode()
    names: list[str] = named.dictionary.to_pylist()
    numbers = named.indices.fill_null(_NONE).to_numpy().astype(np.int64)
    if "" in names:
        numbers[numbers == names.index("")] = _NONE
    first, last, epoch = (
        np.require(column.fill_null(0).to_numpy(), np.int64, ["C", "W"])
        for column in fields.select("sequence", pl.col("last").fill_null(pl.col("sequence")), "epoch").get_columns()
    )
    contiguous = fields.get_column("contiguous").fill_null(value=False).to_numpy().copy()
    return names, _Stamps(numbers, first, last, epoch, contiguous)


def _producers(names: list[str], numbers: Ints, state: ProducerState) -> _Producers | None:
    """The producers of rows as arrays; None if one of them has a gap, or if records are missing."""
    if any(known.skipped is not None for known in state.producers.values()):
        return None
    size = len(names)
    whole = np.zeros((3, size), np.int64)
    found = _Producers(np.zeros(size, np.bool_), whole[0], whole[1], whole[2], np.full(size, _NONE, np.int64))
    for number in np.unique(numbers).tolist():
        known = state.producers.get(names[number]) if number >= 0 else None
        if known is None:
            continue
        if known.missing or known.held:
            return None
        found.known[number] = True
        found.highest[number], found.exact_from[number] = known.highest, known.exact_from
        found.epoch[number] = known.epoch
    return found


def _update(state: ProducerState, names: list[str], producers: _Producers, now: Ints) -> None:
    """Change a state; `now` is the stream time at each of its rows."""
    state.stream_time_ms = int(now[-1])
    seen = np.flatnonzero(producers.row >= 0)
    for number in seen[np.argsort(producers.row[seen])].tolist():
        highest, exact_from = int(producers.highest[number]), int(producers.exact_from[number])
        seen_ms = int(now[producers.row[number]])
        state.producers[names[number]] = Producer(highest, exact_from, int(producers.epoch[number]), seen_ms)
        state.producers.move_to_end(names[number])


@compiled(allocates=False)
def _judge(rows: _Stamps, producers: _Producers, verdicts: npt.NDArray[np.uint8]) -> bool:
    """Judge the rows of a state and change its producers; whether that was possible."""
    known, highest, exact_from, epoch, latest = producers
    for row in range(len(verdicts)):
        one, first, last = rows.producer[row], rows.first[row], rows.last[row]
        if one == _NONE:
            verdicts[row] = UNIDENTIFIED
            continue
        if last < first:
            return False
        if known[one] and rows.epoch[row] < epoch[one]:
            verdicts[row] = FENCED
            continue
        epoch[one], latest[one] = rows.epoch[row], row
        if not known[one]:
            known[one], highest[one], exact_from[one] = True, last, first
        elif last <= highest[one]:
            verdicts[row] = DUPLICATE if first >= exact_from[one] else BELOW_FLOOR
        elif first <= highest[one] or (rows.contiguous[row] and first != highest[one] + 1):
            return False
        else:
            highest[one] = last
            if not rows.contiguous[row]:
                exact_from[one] = first
    return True

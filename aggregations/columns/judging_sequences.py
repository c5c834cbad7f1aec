"""`SequenceFilter` over a column of integers or their digits, in compiled code: the highest number of each state so far."""

from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.columns.arrays import Ints, Mask, Spans
from aggregations.columns.json_reading import follows, integer, word
from aggregations.columns.json_writing import digits_of, put, put_number, put_word
from aggregations.columns.record_text import END, MINUS, NULL, Bytes
from aggregations.columns.records import StoredStates
from aggregations.columns.rulings import (
    ACCEPTED,
    BELOW_FLOOR,
    DUPLICATE,
    UNIDENTIFIED,
    Rulings,
    begins_of,
)
from envelope import EnvelopeError
from envelope.filters.arrival import Scope
from envelope.filters.sequence import (
    KEYED,
    Decreasing,
    SequenceFilter,
    Unusable,
    decreased,
    keyed_warning,
    sequence_number,
)
from persistence.compiled import compiled

_INTEGERS: Final = (pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64(), pl.UInt8(), pl.UInt16(), pl.UInt32(), pl.UInt64())
NUMBERS: Final = frozenset({*_INTEGERS, pl.String(), pl.Binary()})
"""Types of the columns of numbers."""
_MOST: Final = (1 << 63) - 1
_DIGITS: Final = 19
_PLUS: Final = ord("+")
_SEEN: Final = np.frombuffer(b'{"seen":', np.uint8)
_KEYED: Final = np.frombuffer(b',"keyed":', np.uint8)
_LONGEST: Final = 64
"""Bytes of a state's text, at most."""


def judge_sequences(
    rule: SequenceFilter, numbers: pl.Series, keys: pl.Series, codes: Ints, stored: StoredStates
) -> Rulings:
    """Judge rows as `SequenceFilter.judge` does.

    Args:
        rule: The filter.
        numbers: The sequence numbers; of one of the types in `NUMBERS`.
        keys: The records' keys.
        codes: Number of each row's state; the rows of one state together, in the order in which they are judged.
        stored: The states before.
    """
    found = Rulings.of(len(codes), stored)
    number, usable = _numbers(numbers)
    scoped = np.ones(len(codes), np.bool_) if rule.scope_by is Scope.PARTITION else keys.is_not_null().to_numpy()
    usable &= scoped
    states = len(stored.exists)
    seen, keyed, known = np.zeros(states, np.int64), np.zeros(states, np.int64), np.zeros(states, np.bool_)
    data = np.frombuffer(stored.data, np.uint8)
    _read(data, stored.values.first[0], stored.values.last[0], stored.exists, seen, known, keyed, found.left)
    before, warned = np.zeros(len(codes), np.int64), np.zeros(states, np.bool_)
    spans = Spans.of(keys.to_arrow(compat_level=pl.CompatLevel.oldest()))
    _judge(codes, number, usable, *spans, seen, known, keyed, before, found.verdicts, warned)
    unidentified = ~usable if rule.unusable is Unusable.FORWARD else ~scoped
    found.verdicts[unidentified] = UNIDENTIFIED
    found.forward[:] = (usable & (found.verdicts == ACCEPTED)) | unidentified
    for row in np.flatnonzero(~(usable | unidentified)).tolist():
        try:
            sequence_number(numbers[row])
        except EnvelopeError as error:
            found.reject(row, error.reason, error.detail)
    if rule.decreasing is Decreasing.REJECT:
        for row in np.flatnonzero(found.verdicts == BELOW_FLOOR).tolist():
            ruling = decreased(int(number[row]), int(before[row]))
            found.reject(row, ruling.reason, ruling.detail)
    found.warnings += [keyed_warning(rule.name)] * int((warned & ~found.left).sum())
    own = codes[begins_of(codes)]
    texts = np.empty(_LONGEST * len(own), np.uint8)
    end = _write(own, seen, known, keyed, texts, found.values.first[0], found.values.last[0])
    found.texts = texts[:end].tobytes()
    return found


def _numbers(column: pl.Series) -> tuple[Ints, Mask]:
    """The numbers of rows, and which of them can be used, as `sequence_number` says."""
    if column.dtype in (pl.String(), pl.Binary()):
        found, usable = np.zeros(len(column), np.int64), np.zeros(len(column), np.bool_)
        _parse(*Spans.of(column.to_arrow(compat_level=pl.CompatLevel.oldest())), found, usable)
        return found, usable
    whole = column.cast(pl.Int64, strict=False)
    return np.require(whole.fill_null(0).to_numpy(), np.int64, ["C", "W"]), whole.is_not_null().to_numpy().copy()


@compiled(allocates=False)
def _parse(data: Bytes, starts: Ints, lengths: Ints, numbers: Ints, usable: Mask) -> None:
    """Read decimal digits, with a sign or without."""
    for row in range(len(starts)):
        at, end = starts[row], starts[row] + lengths[row]
        negative = at < end and data[at] == MINUS
        if at < end and (negative or data[at] == _PLUS):
            at += 1
        if not 0 < end - at <= _DIGITS:
            continue
        magnitude, fine = np.uint64(0), True
        for i in range(at, end):
            fine = fine and 48 <= data[i] <= 57
            magnitude = magnitude * np.uint64(10) + np.uint64(data[i] - 48)
        if fine and magnitude <= np.uint64(_MOST) + np.uint64(negative):
            usable[row] = True
            numbers[row] = np.int64(np.uint64(0) - magnitude if negative else magnitude)


@compiled(allocates=False)
def _read(data: Bytes, first: Ints, last: Ints, exists: Mask, seen: Ints, known: Mask, keyed: Ints, left: Mask) -> None:
    """Read states, as `SequenceFilter.dump` makes them; those of another form are left."""
    for state in range(len(exists)):
        if not exists[state]:
            continue
        end = last[state]
        at = follows(data, first[state], end, _SEEN, 0, len(_SEEN))
        null = word(data, at, end, NULL)
        if null >= 0:
            at = null
        elif at >= 0:
            seen[state], at = integer(data, at, end)
            known[state] = True
        more = follows(data, at, end, _KEYED, 0, len(_KEYED))
        if more >= 0:
            keyed[state], at = integer(data, more, end)
        left[state] = at < 0 or at != end - 1 or data[at] != END


@compiled(allocates=False)
def _contains(data: Bytes, at: int, end: int, number: int) -> bool:
    """Whether a key contains the decimal digits of a number, between other characters than digits."""
    magnitude = np.uint64(number)
    if number < 0:
        magnitude = np.uint64(0) - magnitude
    digits = digits_of(magnitude)
    while at < end:
        begin = at
        while at < end and 48 <= data[at] <= 57:
            at += 1
        if at - begin == digits:
            rest, same = magnitude, True
            for i in range(digits):
                same = same and np.uint64(data[at - 1 - i]) == np.uint64(48) + rest % np.uint64(10)
                rest //= np.uint64(10)
            if same:
                return True
        at += 1
    return False


@compiled(allocates=False)
def _judge(
    codes: Ints,
    numbers: Ints,
    usable: Mask,
    keys: Bytes,
    starts: Ints,
    lengths: Ints,
    seen: Ints,
    known: Mask,
    keyed: Ints,
    before: Ints,
    verdicts: npt.NDArray[np.uint8],
    warned: Mask,
) -> None:
    """Judge rows and change the states; `before` receives the highest number before each row."""
    for row in range(len(codes)):
        if not usable[row]:
            continue
        state, number = codes[row], numbers[row]
        before[row] = seen[state]
        if known[state] and number <= seen[state]:
            verdicts[row] = DUPLICATE if number == seen[state] else BELOW_FLOOR
            continue
        seen[state], known[state] = number, True
        if keyed[state] == KEYED:
            continue
        if lengths[row] > 0 and _contains(keys, starts[row], starts[row] + lengths[row], number):
            keyed[state] += 1
            warned[state] = keyed[state] == KEYED
        else:
            keyed[state] = 0


@compiled(allocates=False)
def _write(own: Ints, seen: Ints, known: Mask, keyed: Ints, out: Bytes, first: Ints, last: Ints) -> int:
    """Write the texts of states, and return where the last one ends."""
    at = 0
    for i in range(len(own)):
        state = own[i]
        first[state] = at
        at = put(out, at, _SEEN, 0, len(_SEEN))
        at = put_number(out, at, seen[state]) if known[state] else put_word(out, at, NULL)
        if keyed[state]:
            at = put_number(out, put(out, at, _KEYED, 0, len(_KEYED)), keyed[state])
        out[at] = END
        at += 1
        last[state] = at
    return at

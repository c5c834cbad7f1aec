"""Reads JSON text in compiled code: constant text, integers, lists of integers, and where any other value ends."""

from typing import Final

import numpy as np

from aggregations.columns.arrays import Ints
from aggregations.columns.record_text import (
    BEGIN,
    CLOSE,
    COMMA,
    END,
    MINUS,
    OPEN,
    QUOTE,
    WORD_FIRST,
    WORDS,
    Bytes,
)
from persistence.compiled import compiled

LONG: Final = -3
"""A list has more numbers than the array that they are read into."""

_DIGITS: Final = 19
_TENTH: Final = (2**63 - 1) // 10
_PLAIN, _QUOTED, _ESCAPE, _BEGINS, _ENDS, _SEPARATES = range(6)
_SIGNS: Final = np.zeros(256, np.uint8)
"""What a byte means to `value_end`."""
_SIGNS[[QUOTE, ord("\\"), OPEN, BEGIN, CLOSE, END, COMMA]] = (
    *(_QUOTED, _ESCAPE, _BEGINS, _BEGINS, _ENDS, _ENDS, _SEPARATES),
)


@compiled(allocates=False)
def follows(data: Bytes, at: int, end: int, texts: Bytes, first: int, last: int) -> int:
    """Where the text from `first` up to `last` ends in the data; -1 if other text follows there."""
    if at < 0 or at + last - first > end:
        return -1
    for i in range(last - first):
        if data[at + i] != texts[first + i]:
            return -1
    return at + last - first


@compiled(allocates=False)
def word(data: Bytes, at: int, end: int, which: int) -> int:
    """Where one of `WORDS` ends; -1 if other text follows."""
    return follows(data, at, end, WORDS, WORD_FIRST[which], WORD_FIRST[which + 1])


@compiled(allocates=False)
def integer(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """An integer, and where it ends; -1 if there is none."""
    negative = at < end and data[at] == MINUS
    if negative:
        at += 1
    begin, value = at, 0
    while at < end and 48 <= data[at] <= 57:
        digit = data[at] - 48
        if at - begin == _DIGITS or value > _TENTH or (value == _TENTH and digit > 7):
            return 0, -1
        value = value * 10 + digit
        at += 1
    if at == begin or (data[begin] == 48 and (at > begin + 1 or negative)):
        return 0, -1
    return -value if negative else value, at


@compiled(allocates=False)
def integers(data: Bytes, at: int, end: int, into: Ints) -> tuple[int, int]:
    """The number of integers in a list up to its end, and where the list ends; -1 if there are others in it."""
    count = 0
    while True:
        value, at = integer(data, at, end)
        if at < 0 or at >= end:
            return count, -1
        if count == len(into):
            return count, LONG
        into[count] = value
        count += 1
        if data[at] == CLOSE:
            return count, at + 1
        if data[at] != COMMA:
            return count, -1
        at += 1


@compiled(allocates=False)
def value_end(data: Bytes, at: int, end: int) -> int:
    """Where a JSON value ends, if it is valid; -1 if it has no end."""
    depth, quoted = 0, False
    while at < end:
        sign = _SIGNS[data[at]]
        if sign == _PLAIN:
            pass
        elif quoted:
            if sign == _ESCAPE:
                at += 1
            elif sign == _QUOTED:
                quoted = False
        elif sign == _QUOTED:
            quoted = True
        elif sign == _BEGINS:
            depth += 1
        elif depth == 0 and sign != _ESCAPE:
            return at
        elif sign == _ENDS:
            depth -= 1
        at += 1
    return -1

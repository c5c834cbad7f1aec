"""Writes JSON text in compiled code: constant text, integers and lists of integers. `json_reading` reads it."""

from typing import Final

import numpy as np

from aggregations.columns.arrays import Ints
from aggregations.columns.record_text import CLOSE, COMMA, MINUS, WORD_FIRST, WORDS, Bytes
from persistence.compiled import compiled, copy_bytes

_FEW_BYTES: Final = 16
"""So many are copied in a loop: faster than by a call."""
_POWERS: Final = np.array([10**digits for digits in range(20)], np.uint64)


@compiled(allocates=False)
def put(out: Bytes, at: int, texts: Bytes, first: int, last: int) -> int:
    """Write the text from `first` up to `last` and return where it ends."""
    if last - first > _FEW_BYTES:
        copy_bytes(out, at, texts, first, last - first)
    else:
        for i in range(last - first):
            out[at + i] = texts[first + i]
    return at + last - first


@compiled(allocates=False)
def put_word(out: Bytes, at: int, word: int) -> int:
    """Write one of `WORDS` and return where it ends."""
    return put(out, at, WORDS, WORD_FIRST[word], WORD_FIRST[word + 1])


@compiled(allocates=False)
def digits_of(magnitude: np.uint64) -> int:
    """Number of decimal digits of an unsigned number."""
    digits = 1
    while digits < len(_POWERS) and magnitude >= _POWERS[digits]:
        digits += 1
    return digits


@compiled(allocates=False)
def put_number(out: Bytes, at: int, number: int) -> int:
    """Write an integer and return where it ends. Its digits are of the magnitude as an unsigned number."""
    magnitude = np.uint64(number)
    if number < 0:
        out[at] = MINUS
        at += 1
        magnitude = np.uint64(0) - magnitude
    digits = digits_of(magnitude)
    for i in range(digits):
        out[at + digits - 1 - i] = np.uint8(48) + np.uint8(magnitude % np.uint64(10))
        magnitude //= np.uint64(10)
    return at + digits


@compiled(allocates=False)
def put_numbers(out: Bytes, at: int, numbers: Ints, first: int, last: int, step: int) -> int:
    """Write a list without its opening bracket."""
    for i in range(first, last, step):
        at = put_number(out, at, numbers[i])
        out[at] = COMMA
        at += 1
    out[at - 1] = CLOSE
    return at

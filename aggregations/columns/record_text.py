"""The text of many state records: what `persistence.record` and `persistence.lanes` define, for compiled code.

Only the usual form is handled, as `encode_record` writes it, member by member without white space. Everything else is
left to `decode_record`: other definitions, holes, retired or late lanes, positions with text or without an index,
numbers beyond 63 bits, damage.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints

Bytes = npt.NDArray[np.uint8]

WHOLE, TEXT = 0, 1
"""Kinds of values in a state: an integer or null; any other JSON value."""

_WORDS = (
    b',"crc32c":"',
    b',"lanes":{',
    b"null",
    b"0123456789abcdef",
    b'"at":[',
    b'"held":[',
    b'"steps":[',
    b'"index":[',
    b'"floor":[',
    b'"used":',
    b'"wide":true',
    b',"time":',
)
WORDS = np.frombuffer(b"".join(_WORDS), np.uint8)
WORD_FIRST = np.cumsum([0, *map(len, _WORDS)])
TAIL, LANES, NULL, HEX, AT, HELD, STEPS, INDEX, FLOOR, USED, WIDE, TIME = range(12)
QUOTE, COMMA, COLON, MINUS = ord('"'), ord(","), ord(":"), ord("-")
OPEN, CLOSE, BEGIN, END = ord("["), ord("]"), ord("{"), ord("}")


class Form(NamedTuple):
    """The constant text of a stage's records.

    Attributes:
        head: Everything before the state.
        kinds: Kind of each value in the state.
        piece_first: Where each text around the values begins in `pieces`: one before each value, one after the last.
        pieces: These texts.
    """

    head: Bytes
    kinds: npt.NDArray[np.uint8]
    piece_first: Ints
    pieces: Bytes


class Values(NamedTuple):
    """Values in the states, by value and state. In a stage whose states expire, a further one: their latest event time.

    Attributes:
        whole: The integers.
        known: 0 for null, else 1.
        first: Where the text of a value begins.
        last: Where it ends.
    """

    whole: npt.NDArray[np.int64]
    known: npt.NDArray[np.uint8]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]

    @classmethod
    def of(cls, kinds: int, states: int) -> "Values":
        """Arrays for so many values in so many states, all of them null."""
        whole = np.zeros((kinds, states), np.int64)
        return cls(whole, np.zeros((kinds, states), np.uint8), whole.copy(), whole.copy())

    def members(self, kinds: int) -> "Values":
        """The first so many values in all states."""
        return Values(self.whole[:kinds], self.known[:kinds], self.first[:kinds], self.last[:kinds])

    def of_keys(self, keys: Ints) -> "Values":
        """The values of some states."""
        whole, known = self.whole.take(keys, 1), self.known.take(keys, 1)
        return Values(whole, known, self.first.take(keys, 1), self.last.take(keys, 1))

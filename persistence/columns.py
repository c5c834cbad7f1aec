"""Lists of integers in a state record.

Ascending numbers are written as steps: the first number, then the difference from each to the next; -n stands for n
differences of 1.

Any other column is one number if all are equal, otherwise the lowest and the difference of each from it. A packed column
is the text `lowest:width:differences`: every difference has `width` bits, and all of them are one number in base64, the
first difference in its highest bits.
"""

from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, groupby, repeat
from operator import sub
from typing import Any, TypeAlias

import msgspec

from persistence.seal import DamagedError

Column: TypeAlias = int | list[int] | str

_LONGEST_RUN = 1 << 20
"""Limit of steps of 1 in a row; no history holds this many positions."""


def steps_of(ascending: Sequence[Any]) -> list[int]:
    """The first number, then the steps; -n for n steps of 1 where most of them are."""
    steps = [ascending[0]]
    steps += map(sub, ascending[1:], ascending)
    ones = steps.count(1)
    if ones * 2 <= len(steps):
        return steps
    runs = [(step, len(list(same))) for step, same in groupby(steps[1:])]
    return [steps[0], *chain.from_iterable([-n] if step == 1 < n else [step] * n for step, n in runs)]


def ascending_of(steps: list[int]) -> list[int]:
    """The inverse of `steps_of`.

    Raises:
        DamagedError: It wrote no such steps.
    """
    if min(steps) < 0:
        if steps[0] < 0 or min(steps) < -_LONGEST_RUN:
            raise DamagedError("a lane's positions are invalid")
        steps = list(chain.from_iterable([1] * -step if step < 0 else [step] for step in steps))
    return list(accumulate(steps))


def plain_column(numbers: Sequence[Any]) -> Column:
    """One number, or the lowest and the differences."""
    lowest: int = min(numbers)
    return lowest if max(numbers) == lowest else [lowest, *(one - lowest for one in numbers)]


def shortest_column(numbers: Sequence[Any]) -> Column:
    """The column packed, unless `plain_column` is shorter."""
    plain, lowest = plain_column(numbers), min(numbers)
    if isinstance(plain, int):
        return plain
    width = (max(numbers) - lowest).bit_length()
    bits = "".join([format(one - lowest, f"0{width}b") for one in numbers])
    text = b2a_base64(int(bits, 2).to_bytes(_bytes(len(bits))), newline=False).decode()
    packed = f"{lowest}:{width}:{text}"
    return min(plain, packed, key=lambda column: len(msgspec.json.encode(column)))


def check_column(column: Column, count: int) -> None:
    """Check that a column has `count` numbers, without making them.

    Raises:
        DamagedError: It has not.
    """
    if isinstance(column, str):
        _differences(column, count)
    elif isinstance(column, list) and len(column) != 1 + count:
        raise DamagedError("a column of numbers is inconsistent")


def numbers_of(column: Column, count: int) -> Iterable[int]:
    """The numbers of a column that `check_column` accepts."""
    if isinstance(column, int):
        return repeat(column, count)
    if isinstance(column, list):
        lowest, *above = column
        return [lowest + one for one in above]
    lowest, width, differences = _differences(column, count)
    bits = format(differences, f"0{count * width}b")
    return [lowest + int(bits[at : at + width], 2) for at in range(0, len(bits), width)]


def _differences(packed: str, count: int) -> tuple[int, int, int]:
    """The lowest number of a packed column, the bits of a difference, and all differences as one number."""
    try:
        lowest, width, text = packed.split(":")
        raw, bits = a2b_base64(text, strict_mode=True), count * int(width)
        differences = int.from_bytes(raw)
        if bits > 0 and len(raw) == _bytes(bits) and differences.bit_length() <= bits:
            return int(lowest), int(width), differences
    except ValueError:
        pass
    raise DamagedError("a packed column of numbers is invalid")


def _bytes(bits: int) -> int:
    return -(-bits // 8)

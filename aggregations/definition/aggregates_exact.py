"""Exact aggregates whose states are more than a number: variance, histogram and collected values."""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import mul
from typing import Any, ClassVar

import numpy as np
import polars as pl

from aggregations.definition.aggregates import At, FieldAggregate, SequenceAggregate
from aggregations.definition.expressions import Expression
from aggregations.definition.values import INT64
from aggregations.errors import FlowError
from envelope import EnvelopeError, Reason
from envelope.dedup.lineage import position_order

_MANTISSA = 53  # bits of a float's mantissa
_LARGEST = 511  # the variance of values below 2^511 is below 2^1023, so it is finite
_MOST_BOUNDS = 1_000
_MOST_VALUES = 1_000
_RANGES = {pl.Int64: (-INT64, INT64 - 1), pl.UInt64: (0, 2 * INT64 - 1)}


class Variance(SequenceAggregate):
    """Sample variance; null with fewer than two values.

    The state holds the number of values and, without rounding, their sum and the sum of their squares. These do not
    depend on the order of the values, nor on where batches end. Only the result is rounded, once.

    The state is {"count", "sum", "squares", "scale"}: the sum is `sum` / 2^`scale`, the sum of squares
    `squares` / 4^`scale`. Both are decimal text, because they may exceed 64 bits.
    """

    kind = "variance"
    numeric = True

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        if isinstance(value, float):
            return self.extend(state, self.prepared(pl.Series([value])), ())
        return self.extend(state, [value], ())

    def prepared(self, values: pl.Series) -> Sequence[Any]:
        """Mantissa and exponent of every float; integers unchanged."""
        if not values.dtype.is_float():
            return values.to_list()
        fractions, exponents = np.frexp(values.cast(pl.Float64).to_numpy())
        mantissas = np.ldexp(fractions, _MANTISSA).astype(np.int64)
        return list(zip(mantissas.tolist(), (exponents - _MANTISSA).tolist(), strict=True))

    def extend(self, state: Any, values: Sequence[Any], at: Sequence[At]) -> Any:
        count, total, squares, scale = _moments(state)
        if not isinstance(values[0], tuple):
            whole = _shifted((sum(values), sum(map(mul, values, values)), 0), scale)
            return _of_moments(count + len(values), total + whole[0], squares + whole[1], scale)
        if max(exponent for _, exponent in values) > _LARGEST - _MANTISSA:
            raise EnvelopeError(Reason.OVERFLOW, "a value is too large for a variance")
        shift = max(scale, -min(exponent for _, exponent in values))
        total, squares, scale = _shifted((total, squares, scale), shift)
        for mantissa, exponent in values:
            number = mantissa << (exponent + scale)
            total += number
            squares += number * number
        return _of_moments(count + len(values), total, squares, scale)

    def merge(self, state: Any, other: Any) -> Any:
        if state is None or other is None:
            return other if state is None else state
        mine, theirs = _moments(state), _moments(other)
        scale = max(mine[3], theirs[3])
        first, second = _shifted(mine[1:], scale), _shifted(theirs[1:], scale)
        return _of_moments(mine[0] + theirs[0], first[0] + second[0], first[1] + second[1], scale)

    def result(self, state: Any) -> Any:
        count, total, squares, scale = _moments(state)
        if count < 2:
            return None
        return (count * squares - total * total) / (count * (count - 1) << 2 * scale)

    def comparable(self, state: Any) -> Any:
        """The exact sums: a value that is missing or doubled need not change the variance."""
        return _moments(state)

    def result_type(self, of: pl.DataType) -> pl.DataType | None:
        return pl.Float64()

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        if state is None:
            return True
        if not isinstance(state, dict) or state.keys() != {"count", "sum", "squares", "scale"}:
            return False
        numbers, texts = (state["count"], state["scale"]), (state["sum"], state["squares"])
        return all(type(one) is int and one >= 0 for one in numbers) and all(map(_is_decimal, texts))


class StandardDeviation(Variance):
    """Square root of the sample variance; null with fewer than two values. The state is that of `Variance`."""

    kind = "standard_deviation"

    def result(self, state: Any) -> Any:
        variance = Variance.result(self, state)
        return None if variance is None else math.sqrt(variance)


@dataclass(frozen=True, slots=True)
class Histogram(SequenceAggregate):
    """Number of values per bucket. The state is {"bounds", "counts"}: it continues only with equal bounds.

    Attributes:
        bounds: Lower bounds of all buckets but the first, ascending.
    """

    bounds: tuple[float, ...] = ()
    kind: ClassVar[str] = "histogram"
    numeric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        FieldAggregate.__post_init__(self)
        object.__setattr__(self, "bounds", tuple(_bound(one) for one in _listed("bounds", self.bounds)))
        if not 1 <= len(self.bounds) <= _MOST_BOUNDS:
            raise FlowError(f"histogram(): bounds takes 1 to {_MOST_BOUNDS:,} numbers, not {len(self.bounds):,}")
        if any(low >= high for low, high in zip(self.bounds, self.bounds[1:], strict=False)):
            raise FlowError("histogram(): bounds must be in ascending order, without repetition")

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return self.extend(state, [bisect_right(self.bounds, value)], ())

    def prepared(self, values: pl.Series) -> Sequence[Any]:
        """The number of every value's bucket."""
        if values.dtype.is_float():
            found = np.searchsorted(self.bounds, values.cast(pl.Float64).to_numpy(), side="right")
        elif values.dtype == pl.Boolean or values.dtype in _NARROWER or values.dtype in _RANGES:
            dtype: Any = pl.UInt64 if values.dtype == pl.UInt64 else pl.Int64
            low, high = _RANGES[dtype]
            # An integer is at least a bound if it is at least the bound rounded up. Floats would round large integers.
            limits = [max(low, one) for one in map(math.ceil, self.bounds) if one <= high]
            numbers = values.cast(dtype).to_numpy()
            found = np.searchsorted(np.array(limits, numbers.dtype), numbers, side="right")
        else:
            found = np.array([bisect_right(self.bounds, one) for one in values.to_list()], np.int64)
        return found  # type: ignore[return-value]

    def extend(self, state: Any, values: Sequence[Any], at: Sequence[At]) -> Any:
        new = np.bincount(np.asarray(values, np.int64), minlength=len(self.bounds) + 1).tolist()
        return self.merge(state, {"bounds": list(self.bounds), "counts": new})

    def merge(self, state: Any, other: Any) -> Any:
        if state is None or other is None:
            return other if state is None else state
        counts = [mine + theirs for mine, theirs in zip(state["counts"], other["counts"], strict=True)]
        return {"bounds": list(self.bounds), "counts": counts}

    def result(self, state: Any) -> Any:
        return {"bounds": list(self.bounds), "counts": [0] * (len(self.bounds) + 1)} if state is None else state

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        if state is None:
            return True
        return (
            isinstance(state, dict)
            and state.keys() == {"bounds", "counts"}
            and state["bounds"] == list(self.bounds)
            and isinstance(state["counts"], list)
            and len(state["counts"]) == len(self.bounds) + 1
            and all(type(one) is int and one >= 0 for one in state["counts"])
        )

    def options(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds)}


@dataclass(frozen=True, slots=True)
class Collect(SequenceAggregate):
    """The values at the lowest positions. The state is {"kept", "dropped"}: [position, lane, value] of each of them.

    Attributes:
        limit: How many values it keeps.
    """

    limit: int = 0
    kind: ClassVar[str] = "collect"
    ordered: ClassVar[bool] = True
    selects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        FieldAggregate.__post_init__(self)
        check_size("collect", "limit", self.limit, 1, _MOST_VALUES)

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return self.extend(state, [value], [at])

    def extend(self, state: Any, values: Sequence[Any], at: Sequence[At]) -> Any:
        new = [[list(place[0]), place[1], value] for place, value in zip(at[: self.limit], values, strict=False)]
        return self.merge(state, {"kept": new, "dropped": len(values) - len(new)})

    def merge(self, state: Any, other: Any) -> Any:
        if state is None or other is None:
            return other if state is None else state
        merged = heapq.merge(state["kept"], other["kept"], key=lambda one: _rank((tuple(one[0]), one[1])))
        kept = list(islice(merged, self.limit))
        cut = len(state["kept"]) + len(other["kept"]) - len(kept)
        return {"kept": kept, "dropped": state["dropped"] + other["dropped"] + cut}

    def result(self, state: Any) -> Any:
        if state is None:
            return {"values": [], "dropped": 0}
        return {"values": [value for _, _, value in state["kept"]], "dropped": state["dropped"]}

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        if state is None:
            return True
        if not isinstance(state, dict) or state.keys() != {"kept", "dropped"}:
            return False
        kept, dropped = state["kept"], state["dropped"]
        if not isinstance(kept, list) or type(dropped) is not int or dropped < 0:
            return False
        if not all(isinstance(one, list) and len(one) == len(("position", "lane", "value")) for one in kept):
            return False
        # With another limit it lacks values that the state has dropped, or holds too many.
        return len(kept) == self.limit or (len(kept) < self.limit and not dropped)

    def options(self) -> dict[str, Any]:
        return {"limit": self.limit}


def _rank(at: At) -> tuple[Any, ...]:
    return position_order(at[0]), at[1]


def check_size(kind: str, name: str, given: object, low: int, high: int) -> None:
    """Check an integer option of an aggregate.

    Raises:
        FlowError: It is not an integer from `low` to `high`.
    """
    if type(given) is not int or not low <= given <= high:
        raise FlowError(f"{kind}(): {name} takes an integer from {low:,} to {high:,}; got {given!r}")


def _listed(name: str, given: object) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise FlowError(f"histogram(): {name} takes a list of numbers; got {type(given).__name__}")
    return list(given)


def _bound(given: Any) -> float:
    if type(given) not in (int, float) or not math.isfinite(given) or int(float(given)) != int(given):
        raise FlowError(
            f"histogram(): {given!r} is not a bound; use finite numbers that a 64-bit floating-point number can hold"
        )
    return float(given) + 0.0  # -0.0 becomes 0.0


def _moments(state: Any) -> tuple[int, int, int, int]:
    if state is None:
        return 0, 0, 0, 0
    return state["count"], int(state["sum"]), int(state["squares"]), state["scale"]


def _shifted(moments: tuple[int, int, int], scale: int) -> tuple[int, int, int]:
    """Sum and sum of squares in units of a larger or equal scale."""
    total, squares, before = moments
    return total << (scale - before), squares << 2 * (scale - before), scale


def _of_moments(count: int, total: int, squares: int, scale: int) -> dict[str, Any]:
    """The state, with the smallest scale: equal sums make equal states."""
    spare = min(scale, _zeros(total, scale), _zeros(squares, 2 * scale) // 2)
    return {"count": count, "sum": str(total >> spare), "squares": str(squares >> 2 * spare), "scale": scale - spare}


def _zeros(number: int, most: int) -> int:
    """Number of zero bits at the end, at most `most`."""
    return min(most, (number & -number).bit_length() - 1) if number else most


def _is_decimal(text: object) -> bool:
    return isinstance(text, str) and text.removeprefix("-").isdecimal() and text.isascii()


_NARROWER = frozenset({pl.Int8, pl.Int16, pl.Int32, pl.UInt8, pl.UInt16, pl.UInt32})


def variance(of: Expression, *, where: Expression | None = None) -> FieldAggregate:
    """Sample variance of `of`: exact sums, rounded once. Values from 2^511 are rejected as `overflow`."""
    return Variance(of, where=where)


def standard_deviation(of: Expression, *, where: Expression | None = None) -> FieldAggregate:
    """Square root of the sample variance of `of`."""
    return StandardDeviation(of, where=where)


def histogram(of: Expression, bounds: Iterable[float], *, where: Expression | None = None) -> FieldAggregate:
    """Number of values of `of` in each bucket: below the first bound, from each bound up to the next, from the last on.

    Args:
        of: Column name or expression of numbers.
        bounds: Ascending numbers, at most 1,000; a value that equals a bound is in the bucket that begins there.
        where: Only elements for which it is true are folded.
    """
    return Histogram(of, where=where, bounds=bounds)  # type: ignore[arg-type]  # checked and converted there


def collect(of: Expression, limit: int, *, where: Expression | None = None) -> FieldAggregate:
    """The `limit` values of `of` at the lowest positions, and how many others were dropped. Not by arrival.

    Args:
        of: Column name or expression.
        limit: 1 to 1,000.
        where: Only elements for which it is true are folded.
    """
    return Collect(of, where=where, limit=limit)

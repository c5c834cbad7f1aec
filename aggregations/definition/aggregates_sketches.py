"""Approximate aggregates: small states for any number of values, with a stated error.

The states name their form and its version: `{"hll": 1, ...}`. Distinct counts and quantiles are sketches of Apache
DataSketches in its serialized form. The hash of a value is MurmurHash3 with DataSketches' seed, the same in every process.
"""

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import datasketches
import numpy as np
import polars as pl

from aggregations.definition.aggregates import At, FieldAggregate, SequenceAggregate
from aggregations.definition.aggregates_exact import check_size
from aggregations.definition.expressions import Expression
from aggregations.definition.values import INT64
from aggregations.errors import FlowError

VERSION: Final = 1
"""Version of the form of the states; a state of another version does not fit."""

# Where DataSketches stores the mode of an HLL sketch, and the number and the beginning of the set of hashes it keeps
# while there are few values (https://datasketches.apache.org/docs/HLL/HllPreamble.html).
_MODE, _MODE_BITS, _SET = 7, 3, 1
_SET_BEGIN = 12
_NAN = float("nan")
_ROUNDED = 2.0**53
"""From here on not every integer is a 64-bit floating-point number."""


@dataclass(frozen=True, slots=True)
class ApproximateDistinct(SequenceAggregate):
    """Approximate number of distinct values, by an HLL sketch. The state is {"hll", "sketch"}.

    Attributes:
        precision: Base-2 logarithm of the number of registers.
    """

    precision: int = 11
    kind: ClassVar[str] = "approximate_distinct"

    def __post_init__(self) -> None:
        FieldAggregate.__post_init__(self)
        check_size(self.kind, "precision", self.precision, 4, 18)

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return self.extend(state, [_hashed(value)], ())

    def prepared(self, values: pl.Series) -> Sequence[Any]:
        """The values as DataSketches takes them."""
        return list(map(_hashed, values.to_list()))

    def extend(self, state: Any, values: Sequence[Any], at: Sequence[At]) -> Any:
        sketch = self._sketch(state)
        update = sketch.update
        for value in dict.fromkeys(values):  # a value that comes again changes nothing
            update(value)
        return _stored("hll", _canonical(sketch.serialize_compact()))

    def merge(self, state: Any, other: Any) -> Any:
        if state is None or other is None:
            return other if state is None else state
        union = datasketches.hll_union(self.precision)
        union.update(self._sketch(state))
        union.update(self._sketch(other))
        return _stored("hll", _canonical(union.get_result(datasketches.tgt_hll_type.HLL_6).serialize_compact()))

    def result(self, state: Any) -> Any:
        return 0 if state is None else round(self._sketch(state).get_estimate())

    def comparable(self, state: Any) -> Any:
        """The estimate of a merged sketch: that of a sketch depends on the order of its values."""
        if state is None:
            return 0
        union = datasketches.hll_union(self.precision)
        for _ in range(2):  # a union of one sketch keeps its estimate
            union.update(self._sketch(state))
        return round(union.get_estimate())

    def result_type(self, of: pl.DataType) -> pl.DataType | None:
        return pl.Int64()

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        sketch = _read(state, "hll", datasketches.hll_sketch.deserialize)
        if sketch is None:
            return state is None
        found = sketch.lg_config_k, sketch.tgt_type
        return bool(found == (self.precision, datasketches.tgt_hll_type.HLL_6))

    def options(self) -> dict[str, Any]:
        return {"precision": self.precision}

    def _sketch(self, state: Any) -> Any:
        if state is None:
            return datasketches.hll_sketch(self.precision, datasketches.tgt_hll_type.HLL_6)
        return datasketches.hll_sketch.deserialize(b64decode(state["sketch"]))


@dataclass(frozen=True, slots=True)
class Quantiles(SequenceAggregate):
    """Approximate quantiles, by a KLL sketch of 64-bit floating-point numbers. The state is {"kll", "sketch"}.

    If the lowest or the highest value is an integer that such a number rounds, the state also has "ends": both of them.

    Attributes:
        at: Ranks of the quantiles, from 0 to 1.
        k: Size of the sketch.
    """

    at: tuple[float, ...] = (0.5, 0.99)
    k: int = 200
    kind: ClassVar[str] = "quantiles"
    numeric: ClassVar[bool] = True

    def __post_init__(self) -> None:
        FieldAggregate.__post_init__(self)
        object.__setattr__(self, "at", _ranks(self.at))
        check_size(self.kind, "k", self.k, 8, 4_096)

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return self.extend(state, np.array([value]), ())  # type: ignore[arg-type]  # an array is a sequence

    def prepared(self, values: pl.Series) -> Sequence[Any]:
        """The values as an array: of integers if a floating-point number could round one of them."""
        floats = values.cast(pl.Float64)
        if values.dtype.is_integer() and (floats.abs() >= _ROUNDED).any():
            return values.to_numpy(writable=True)  # type: ignore[return-value]  # an array is a sequence
        return floats.to_numpy(writable=True)  # type: ignore[return-value]

    def extend(self, state: Any, values: Sequence[Any], at: Sequence[At]) -> Any:
        array: np.ndarray[Any, Any] = np.asarray(values)
        sketch = self._sketch(state)
        before = None if state is None else self._ends(state, sketch)
        sketch.update(array.astype(np.float64, copy=False))
        return self._with_ends(sketch, before, (array.min().item(), array.max().item()))

    def merge(self, state: Any, other: Any) -> Any:
        if state is None or other is None:
            return other if state is None else state
        sketch, further = self._sketch(state), self._sketch(other)
        ends = self._ends(state, sketch), self._ends(other, further)
        sketch.merge(further)
        return self._with_ends(sketch, *ends)

    def result(self, state: Any) -> Any:
        if state is None:
            return [None] * len(self.at)
        sketch = self._sketch(state)
        ends = dict(zip((0.0, 1.0), self._ends(state, sketch), strict=True))  # the sketch may have dropped them
        found = sketch.get_quantiles(list(self.at), inclusive=True)
        return [ends.get(rank, float(one)) for rank, one in zip(self.at, found, strict=True)]

    def comparable(self, state: Any) -> Any:
        """Number of values, minimum and maximum: the quantiles depend on chance."""
        if state is None:
            return None
        sketch = self._sketch(state)
        return [sketch.n, *self._ends(state, sketch)]

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        if isinstance(state, dict) and "ends" in state:
            ends = state["ends"]
            if not (isinstance(ends, list) and len(ends) == len(("lowest", "highest"))):
                return False
            if not all(type(one) in (int, float) for one in ends) or ends[0] > ends[1]:
                return False
            state = {name: value for name, value in state.items() if name != "ends"}
        sketch = _read(state, "kll", datasketches.kll_doubles_sketch.deserialize)
        return state is None if sketch is None else bool(sketch.k == self.k)

    def _ends(self, state: Any, sketch: Any) -> tuple[Any, Any]:
        """The lowest and the highest value of a state with its sketch."""
        lowest, highest = state.get("ends") or (sketch.get_min_value(), sketch.get_max_value())
        return lowest, highest

    def _with_ends(self, sketch: Any, *ends: tuple[Any, Any] | None) -> Any:
        """A state of this sketch, and of parts with these ends."""
        known = [one for one in ends if one is not None]
        exact = min(one[0] for one in known), max(one[1] for one in known)
        rounded = sketch.get_min_value(), sketch.get_max_value()
        stored = _stored("kll", sketch.serialize())
        if exact == rounded:
            return stored
        # The same numbers, whether they were added one by one or together: 4.0, not 4, beside a rounded integer.
        return {**stored, "ends": [end if one == end else one for one, end in zip(exact, rounded, strict=True)]}

    def options(self) -> dict[str, Any]:
        return {"k": self.k}

    def result_options(self) -> dict[str, Any]:
        return {"at": list(self.at)}

    def result_type(self, of: pl.DataType) -> pl.DataType | None:
        return pl.List(pl.Float64())

    def _sketch(self, state: Any) -> Any:
        if state is None:
            return datasketches.kll_doubles_sketch(self.k)
        return datasketches.kll_doubles_sketch.deserialize(b64decode(state["sketch"]))


@dataclass(frozen=True, slots=True)
class Top(SequenceAggregate):
    """The most frequent values. The state is {"top", "error", "counts"}, with [value, count] of each counter.

    There are at most `size` counters. If there is one more, the median of the counts is subtracted from all of them,
    and those that reach 0 are dropped (Anderson et al., "A High-Performance Algorithm for Identifying Frequent Items
    in Data Streams", 2017). What was subtracted is the error: at most 2 / `size` of the number of values, because each
    time at least half of the counters lose as much. Unlike DataSketches' own sketch, the state does not
    depend on the hashes of a platform.

    Attributes:
        n: How many values the result has.
        size: Most counters that the state has.
    """

    n: int = 0
    size: int = 256
    kind: ClassVar[str] = "top"

    def __post_init__(self) -> None:
        FieldAggregate.__post_init__(self)
        check_size(self.kind, "size", self.size, 2, 10_000)
        check_size(self.kind, "n", self.n, 1, self.size)

    def add(self, state: Any, value: Any, by: Any, at: At) -> Any:
        return self.extend(state, [value], ())

    def extend(self, state: Any, values: Sequence[Any], at: Sequence[At]) -> Any:
        counts, error = _counts(state)
        new = Counter(values)
        if len(counts.keys() | new.keys()) <= self.size:
            counts.update(new)
            return _of_counts(counts, error)
        for value in values:
            counts[value] += 1
            if len(counts) > self.size:
                error += _reduce(counts)
        return _of_counts(counts, error)

    def merge(self, state: Any, other: Any) -> Any:
        if state is None or other is None:
            return other if state is None else state
        (counts, error), (more, further) = _counts(state), _counts(other)
        error += further
        counts.update(more)
        while len(counts) > self.size:
            error += _reduce(counts)
        return _of_counts(counts, error)

    def result(self, state: Any) -> Any:
        counts, error = _counts(state)
        ordered = sorted(counts.items(), key=lambda one: (-one[1], str(one[0])))
        return {"values": [list(one) for one in ordered[: self.n]], "error": error}

    def comparable(self, state: Any) -> Any:
        """All counters if they are exact; otherwise only that they are not: the numbers depend on the order of values."""
        counts, error = _counts(state)
        if error:
            return "inexact"
        found = [
            [value + 0 if isinstance(value, float) else value, count] for value, count in counts.items()
        ]  # no -0.0
        return sorted(found, key=lambda one: (-one[1], str(one[0])))

    def fits(self, state: Any, of: pl.DataType | None = None, by: pl.DataType | None = None) -> bool:
        if state is None:
            return True
        if not isinstance(state, dict) or state.keys() != {"top", "error", "counts"} or state["top"] != VERSION:
            return False
        counts, error = state["counts"], state["error"]
        if not isinstance(counts, list) or len(counts) > self.size or type(error) is not int or error < 0:
            return False
        return all(
            isinstance(one, list) and len(one) == len(("value", "count")) and type(one[1]) is int and one[1] > 0
            for one in counts
        )

    def options(self) -> dict[str, Any]:
        return {"size": self.size}

    def result_options(self) -> dict[str, Any]:
        return {"n": self.n}


def _ranks(given: object) -> tuple[float, ...]:
    ranks = tuple(given) if isinstance(given, Iterable) else ()
    if not ranks or not all(type(one) in (int, float) and 0 <= one <= 1 for one in ranks):
        raise FlowError(f"quantiles(): at takes ranks from 0 to 1, such as (0.5, 0.99); got {given!r}")
    return tuple(map(float, ranks))


def _hashed(value: Any) -> Any:
    """A value as DataSketches hashes it, so that equal values have one hash and different values have two."""
    if isinstance(value, str):
        return value or _NAN  # DataSketches ignores the empty text; no other value is NaN
    if isinstance(value, float) and not (value.is_integer() and -INT64 <= value < 2 * INT64):
        return value
    return int(value) if value < INT64 else str(int(value))  # DataSketches takes signed integers


def _canonical(sketch: bytes) -> bytes:
    """A serialized HLL sketch in which a set of hashes is in order: its own order depends on its history."""
    if sketch[_MODE] & _MODE_BITS != _SET:
        return sketch
    return sketch[:_SET_BEGIN] + np.sort(np.frombuffer(sketch, np.uint32, offset=_SET_BEGIN)).tobytes()


def _stored(form: str, sketch: bytes) -> dict[str, Any]:
    return {form: VERSION, "sketch": b64encode(sketch).decode()}


def _read(state: Any, form: str, deserialize: Callable[[bytes], Any]) -> Any:
    """The sketch in a state; None if it is of another form or version, or damaged."""
    if not isinstance(state, dict) or state.keys() != {form, "sketch"} or state[form] != VERSION:
        return None
    try:
        return deserialize(b64decode(state["sketch"], validate=True))
    except (IndexError, TypeError, ValueError, RuntimeError):
        return None


def _counts(state: Any) -> tuple[Counter[Any], int]:
    if state is None:
        return Counter(), 0
    counts: Counter[Any] = Counter()
    for value, count in state["counts"]:
        counts[value] = count
    return counts, state["error"]


def _of_counts(counts: Counter[Any], error: int) -> dict[str, Any]:
    return {"top": VERSION, "error": error, "counts": [list(one) for one in counts.items()]}


def _reduce(counts: Counter[Any]) -> int:
    """Subtract the median of the counts, in place, and return it."""
    median = sorted(counts.values())[len(counts) // 2]
    kept = {value: count - median for value, count in counts.items() if count > median}
    counts.clear()
    counts.update(kept)
    return median


def approximate_distinct(of: Expression, *, precision: int = 11, where: Expression | None = None) -> FieldAggregate:
    """Approximate number of distinct values of `of`.

    The relative standard error is 0.83 / sqrt(2^precision): 1.8 % for 11, whose state is at most 2.1 KB of text. A merged
    state has 1.04 / sqrt(2^precision). Few values are counted almost exactly.

    Args:
        of: Column name or expression. 1 and 1.0 are one value.
        precision: 4 to 18.
        where: Only elements for which it is true are folded.
    """
    return ApproximateDistinct(of, where=where, precision=precision)


def quantiles(
    of: Expression, at: Iterable[float] = (0.5, 0.99), *, k: int = 200, where: Expression | None = None
) -> FieldAggregate:
    """Approximate quantiles of `of`: for each rank in `at`, a value at about this rank.

    The rank is wrong by at most 1.33 % with k = 200, with a probability of 99 %; the error falls about as 1 / k. Up to k
    values are exact. The sketch chooses at random what it drops: two runs may differ within the error.

    Args:
        of: Column name or expression of numbers, which are folded as 64-bit floating-point numbers.
        at: Ranks from 0 (the minimum, exact) to 1 (the maximum, exact). They do not change the state. A minimum or maximum
            that is an integer beyond 2^53 in absolute value is an integer in the result, and rounded in columns of floats.
        k: 8 to 4,096.
        where: Only elements for which it is true are folded.
    """
    return Quantiles(of, where=where, at=at, k=k)  # type: ignore[arg-type]  # checked and converted there


def top(of: Expression, n: int, *, size: int = 256, where: Expression | None = None) -> FieldAggregate:
    """The `n` most frequent values of `of`, each with its number, and the error of these numbers.

    A number is at most `error` too low, never too high. `error` is 0 up to `size` distinct values, and at
    most 2 / `size` of the number of folded values.

    Args:
        of: Column name or expression.
        n: 1 to `size`. It does not change the state.
        size: Most values that the state counts, 2 to 10,000.
        where: Only elements for which it is true are folded.
    """
    return Top(of, where=where, n=n, size=size)

"""The differences between two sets of states, key by key and field by field."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from typing import Any, Final, NamedTuple

from aggregations.definition.values import Exact
from jobs.table.view import key_as_json

ROUNDING: Final = 1e-9
"""Relative difference up to which floating-point numbers count as equal: the sum of a million numbers of one sign, added
in another order, differs by less."""
SAMPLE: Final = 10
"""Differences of each stage that are shown."""
_PROGRESS: Final = 1_000
_ZERO: Final = Fraction(0)
STATE: Final = ""
"""Name of the field that stands for a state without fields."""


class Seen(NamedTuple):
    """What a reader sees of one key, and what is compared.

    Attributes:
        result: The result of the fold, a JSON value. One difference is counted for each field of an object.
        compared: A value that is equal for two folds of the same elements, of the shape of the result. It is the result
            itself, except for fields whose results depend on order or on chance.
    """

    result: Any
    compared: Any

    @classmethod
    def of(cls, result: Any) -> "Seen":
        """A result that is compared itself."""
        return cls(result, result)


class Row(NamedTuple):
    """One state.

    Attributes:
        stage: Name of its stage.
        key: Its key in the store.
        seen: What readers see of it, by key: of a stage with sessions any number, of others one at most. A state that
            has only dead letters has none, and counts as missing.
    """

    stage: str
    key: bytes
    seen: Mapping[bytes, Seen]


class Likeness(IntEnum):
    """How much two values agree."""

    EQUAL = 0
    ROUNDED = 1
    DIFFERENT = 2


@dataclass(slots=True)
class FieldDifference:
    """The differences of one field, over all keys that both sides have.

    Attributes:
        changed: Number of keys whose values differ.
        rounded: Number of further keys whose values differ by rounding only.
        numbers: Number of changed keys with a number on both sides.
    """

    changed: int = 0
    rounded: int = 0
    numbers: int = 0
    _total: Fraction = _ZERO
    _largest: Fraction = _ZERO

    @property
    def total(self) -> int | float:
        """Sum of new minus old over these keys."""
        return _shown(self._total)

    @property
    def largest(self) -> int | float:
        """The new minus old that is furthest from 0; of two as far, the first."""
        return _shown(self._largest)

    def note(self, old: Any, new: Any, likeness: Likeness) -> None:
        """Count the values of one key."""
        if likeness is Likeness.ROUNDED:
            self.rounded += 1
        if likeness is not Likeness.DIFFERENT:
            return
        self.changed += 1
        if not (_is_finite(old) and _is_finite(new)):
            return
        self.numbers += 1
        change = Fraction(new) - Fraction(old)
        self._total += change
        if abs(change) > abs(self._largest):
            self._largest = change

    def as_json(self) -> dict[str, Any]:
        """The differences as a JSON object; without sum and largest if no key has a number on both sides."""
        counts = {"changed": self.changed, "rounded": self.rounded, "numbers": self.numbers}
        sums = {"sum": self.total, "largest": self.largest} if self.numbers else {}
        return counts | {name: one for name, one in sums.items() if _is_finite(one)}


@dataclass(frozen=True, slots=True)
class Difference:
    """One key that differs.

    Attributes:
        key: The key; in a stage with windows or sessions it names the window or session.
        old: The old result; None if the key is only in the new states.
        new: The new result; None if the key is only in the old states.
    """

    key: bytes
    old: Any
    new: Any

    def as_json(self) -> dict[str, Any]:
        """The difference as a JSON object."""
        return {**key_as_json(self.key), "old": self.old, "new": self.new}


@dataclass(slots=True)
class StageDifferences:
    """The differences of one stage.

    Attributes:
        same: Number of keys that both sides have, with equal results.
        rounded: Number of keys that differ by rounding only.
        changed: Number of keys that both sides have, with different results.
        only_old: Number of keys that are only in the old states.
        only_new: Number of keys that are only in the new states.
        fields: Differences by field; a result without fields has one whose name is empty.
        sample: The first differences, in the order of keys.
    """

    same: int = 0
    rounded: int = 0
    changed: int = 0
    only_old: int = 0
    only_new: int = 0
    fields: dict[str, FieldDifference] = field(default_factory=dict)
    sample: list[Difference] = field(default_factory=list)

    @property
    def differences(self) -> int:
        """Number of keys that differ by more than rounding."""
        return self.changed + self.only_old + self.only_new

    def as_json(self) -> dict[str, Any]:
        """The differences as a JSON object."""
        return {
            "same": self.same,
            "rounded": self.rounded,
            "changed": self.changed,
            "only_old": self.only_old,
            "only_new": self.only_new,
            "fields": {name: one.as_json() for name, one in self.fields.items() if one.changed or one.rounded},
            "sample": [one.as_json() for one in self.sample],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two sets of states.

    Attributes:
        stages: Differences by stage.
    """

    stages: dict[str, StageDifferences]

    @property
    def differences(self) -> int:
        """Number of keys that differ by more than rounding."""
        return sum(one.differences for one in self.stages.values())

    def as_json(self) -> dict[str, Any]:
        """The differences as a JSON object, by stage."""
        return {name: one.as_json() for name, one in self.stages.items()}


def compare(
    old: Iterable[Row],
    new: Iterable[Row],
    *,
    stages: Sequence[str],
    sample: int = SAMPLE,
    progress: Callable[[int, int | None], Any] = lambda _done, _total: None,
) -> Comparison:
    """Compare two sets of states in one pass, in memory that does not depend on their number.

    Args:
        old: States in the order of `stages`, then of the bytes of their keys.
        new: States in the same order.
        stages: Names of all stages of both sides.
        sample: Differences of each stage that are kept.
        progress: Called with the number of states compared, and None.

    Raises:
        ValueError: States are not in this order, or a key occurs twice.
    """
    found = Comparison({stage: StageDifferences() for stage in stages})
    done = 0
    for done, (stage, before, after) in enumerate(_pairs(old, new, stages), start=1):
        differences = found.stages[stage]
        for key in sorted(before.keys() | after.keys()):
            _compare(differences, key, before.get(key), after.get(key), sample)
        if done % _PROGRESS == 0:
            progress(done, None)
    progress(done, None)
    return found


_Pair = tuple[str, Mapping[bytes, Seen], Mapping[bytes, Seen]]


def _pairs(old: Iterable[Row], new: Iterable[Row], stages: Sequence[str]) -> Iterator[_Pair]:
    """Stage and both sides of each key."""
    order = {stage: number for number, stage in enumerate(stages)}
    lefts, rights = _ascending(old, order), _ascending(new, order)
    left, right = next(lefts, None), next(rights, None)
    while left is not None or right is not None:
        first = min(place for place, _ in filter(None, (left, right)))
        before: Mapping[bytes, Seen] = {}
        after: Mapping[bytes, Seen] = {}
        if left is not None and left[0] == first:
            before, left = left[1].seen, next(lefts, None)
        if right is not None and right[0] == first:
            after, right = right[1].seen, next(rights, None)
        yield stages[first[0]], before, after


def _ascending(rows: Iterable[Row], order: Mapping[str, int]) -> Iterator[tuple[tuple[int, bytes], Row]]:
    """Each row with its place in the order."""
    last = (-1, b"")
    for row in rows:
        place = (order[row.stage], row.key)
        if place <= last:
            raise ValueError(f"stage {row.stage}: its states are not in the order of their keys")
        yield place, row
        last = place


def _compare(found: StageDifferences, key: bytes, old: Seen | None, new: Seen | None, sample: int) -> None:
    if old is None or new is None:
        found.only_old += new is None
        found.only_new += old is None
        likeness = Likeness.DIFFERENT
    else:
        likeness = _compare_fields(found, old, new)
        found.same += likeness is Likeness.EQUAL
        found.rounded += likeness is Likeness.ROUNDED
        found.changed += likeness is Likeness.DIFFERENT
    if likeness is Likeness.DIFFERENT and len(found.sample) < sample:
        found.sample.append(Difference(key, old and old.result, new and new.result))


def _compare_fields(found: StageDifferences, old: Seen, new: Seen) -> Likeness:
    """Count the differences of each field, and return that of the most different one."""
    most = Likeness.EQUAL
    olds, news = _fields(old), _fields(new)
    for name in dict.fromkeys([*olds, *news]):
        before, after = olds.get(name, _MISSING), news.get(name, _MISSING)
        likeness = alike(before.compared, after.compared)
        most = max(most, likeness)
        found.fields.setdefault(name, FieldDifference()).note(before.result, after.result, likeness)
    return most


class _Missing:
    """A field that the other side does not have: different from any value, null included."""


_MISSING: Final = Seen(None, _Missing())


def _fields(seen: Seen) -> dict[str, Seen]:
    if isinstance(seen.result, dict) and isinstance(seen.compared, dict):
        return {name: Seen(one, seen.compared[name]) for name, one in seen.result.items()}
    return {STATE: seen}


def alike(old: Any, new: Any) -> Likeness:
    """How much two JSON values agree: a boolean is not a number, and 1 equals 1.0."""
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        if len(old) != len(new):
            return Likeness.DIFFERENT
        return max((alike(one, other) for one, other in zip(old, new, strict=True)), default=Likeness.EQUAL)
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            return Likeness.DIFFERENT
        return max((alike(one, new[name]) for name, one in old.items()), default=Likeness.EQUAL)
    if _is_number(old) and _is_number(new):
        return _alike_numbers(old, new)
    return Likeness.EQUAL if type(old) is type(new) and old == new else Likeness.DIFFERENT


def _alike_numbers(old: float, new: float) -> Likeness:
    if old == new:
        return Likeness.EQUAL
    if not (_is_finite(old) and _is_finite(new)):
        return Likeness.EQUAL if str(old) == str(new) == "nan" else Likeness.DIFFERENT
    if (isinstance(old, int) and isinstance(new, int)) or isinstance(old, Exact) or isinstance(new, Exact):
        return Likeness.DIFFERENT
    exact_old, exact_new = Fraction(old), Fraction(new)
    bound = Fraction(ROUNDING) * max(abs(exact_old), abs(exact_new))
    return Likeness.ROUNDED if abs(exact_new - exact_old) <= bound else Likeness.DIFFERENT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, int) or math.isfinite(value))


def _shown(value: Fraction) -> int | float:
    if value.denominator == 1:
        return value.numerator
    try:
        return float(value)
    except OverflowError:  # the difference of two numbers near the limits of floating point
        return math.inf if value > 0 else -math.inf

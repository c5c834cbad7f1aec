"""Applies a flow's steps to frames: expressions to whole columns, functions to the rows as elements."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.columns.arrays import Mask
from aggregations.definition.element import Element
from aggregations.definition.expressions import CANNOT, Expression, expression
from aggregations.definition.flow import Divert, Filter, Map, Predicate, Publish, Step
from aggregations.definition.integers import LEFT_64_BITS, select_exact
from aggregations.per_message.cause import Cause
from aggregations.per_message.steps import Marking, OutputMessage, called, output_of, truth_of
from envelope import EnvelopeError, Reason

Elements: TypeAlias = Callable[[pl.DataFrame], Iterable[Element[Any]]]
"""Returns the rows of a frame as elements."""

TRANSFORM_FAILED, OVERFLOW = 1, 2
FAILURES: Mapping[int, tuple[Reason, str]] = {
    TRANSFORM_FAILED: (Reason.TRANSFORM_FAILED, CANNOT),
    OVERFLOW: (Reason.OVERFLOW, LEFT_64_BITS),
}
"""Reasons why an expression has no result for a row."""


@dataclass(slots=True)
class Stepped:
    """A frame after some steps.

    Attributes:
        frame: The remaining rows.
        elements: Returns rows as elements, for functions.
        rejected: Rejected rows, as frames before the rejecting step, with the cause.
        filtered: Number of rows that filters removed.
        outputs: Messages that steps publish.
    """

    frame: pl.DataFrame
    elements: Elements
    rejected: list[tuple[pl.DataFrame, Cause]] = field(default_factory=list)
    filtered: int = 0
    outputs: list[OutputMessage] = field(default_factory=list)

    def keep(self, mask: Mask) -> pl.DataFrame:
        """Keep the rows of the mask; return the others."""
        if mask.all():
            return self.frame.clear()
        kept = pl.Series(mask)
        others = self.frame.filter(~kept)
        self.frame = self.frame.filter(kept)
        return others

    def reject(self, bad: Mask, reason: Reason, detail: str) -> None:
        """Reject the rows of the mask."""
        if bad.any():
            self.rejected.append((self.keep(~bad), Cause(reason, detail)))

    def succeeded(self, results: Sequence[Any]) -> list[Any]:
        """Reject the rows whose result is an error; return the other results."""
        failed: dict[Cause, list[int]] = {}
        for row, one in enumerate(results):
            if isinstance(one, EnvelopeError):
                failed.setdefault(Cause.of(one), []).append(row)
        if not failed:
            return list(results)
        good = np.ones(len(results), np.bool_)
        for cause, rows in failed.items():
            self.rejected.append((self.frame[rows], cause))
            good[rows] = False
        self.keep(good)
        return [one for one in results if not isinstance(one, EnvelopeError)]

    def each(self, of: Expression | Callable[[Element[Any]], Any]) -> list[Any]:
        """Evaluate an argument for every row; reject the rows for which that fails."""
        if isinstance(of, str | pl.Expr):
            return evaluated(self, {"_": expression(of)}).to_series().to_list()
        return self.succeeded([called(of, element) for element in self.elements(self.frame)])


def apply_columns(
    steps: Sequence[Step], frame: pl.DataFrame, elements: Elements, marking: Marking | None = None
) -> Stepped:
    """Run filters, maps, diversions and publications over a frame, in order; `marking` marks what they publish."""
    stepped = Stepped(frame, elements)
    for step in steps:
        match step:
            case Filter(keep):
                stepped.filtered += stepped.keep(_predicate(stepped, keep)).height
            case Divert(when):
                stepped.reject(_predicate(stepped, when), Reason.DIVERTED, "the flow diverted it")
            case Map(columns, _):
                found = evaluated(stepped, {name: expression(of) for name, of in columns.items()})
                stepped.frame = stepped.frame.with_columns(found.get_columns())
            case Publish(key=key):
                keys = stepped.each((lambda element: element.key) if key is None else key)
                output, rows = output_of(step, marking), stepped.elements(stepped.frame)
                outputs = stepped.succeeded([called(output, *one) for one in zip(rows, keys, strict=True)])
                stepped.outputs += [one for one in outputs if one is not None]
            case _:
                raise AssertionError(f"{type(step).__name__} cannot be done on columns")
    return stepped


def evaluated(stepped: Stepped, wanted: Mapping[str, pl.Expr]) -> pl.DataFrame:
    """Evaluate expressions for every row; reject the rows for which an evaluation fails."""
    found, failed = evaluate_columns(stepped.frame, wanted)
    if failed.any():
        found = found.filter(pl.Series(failed == 0))
        for code in (TRANSFORM_FAILED, OVERFLOW):
            stepped.reject(failed == code, *FAILURES[code])
            failed = failed[failed != code]
    return found


def evaluate_columns(frame: pl.DataFrame, wanted: Mapping[str, pl.Expr]) -> tuple[pl.DataFrame, npt.NDArray[np.uint8]]:
    """Evaluate expressions for every row.

    Returns:
        The columns of `wanted`, and for every row 0 or the number of the reason in `FAILURES` why it cannot be
        evaluated; the columns of such rows have no meaning.
    """
    failed = np.zeros(frame.height, np.uint8)
    if not wanted:
        return pl.DataFrame(), failed
    found = _select(frame, wanted)
    if found is not None:
        values, overflow = found
        if overflow is not None:
            failed[overflow.to_numpy()] = OVERFLOW
        return values, failed
    _find_bad(frame, wanted, failed, 0)
    good = np.flatnonzero(failed == 0)
    # Every row was tried, alone or with others, so this cannot raise.
    values, overflow = select_exact(frame[good], wanted)
    if overflow is not None:
        failed[good[overflow.to_numpy()]] = OVERFLOW
    if not len(good):
        return values.clear(frame.height), failed
    places = np.zeros(frame.height, np.int64)
    places[good] = np.arange(len(good))
    return values[places], failed


def _predicate(stepped: Stepped, of: Predicate) -> Mask:
    if not isinstance(of, str | pl.Expr):
        return np.array(stepped.each(truth_of(of)), np.bool_)
    found = evaluated(stepped, {"predicate": expression(of)})
    return found.get_column("predicate").fill_null(value=False).to_numpy()


def _select(frame: pl.DataFrame, wanted: Mapping[str, pl.Expr]) -> tuple[pl.DataFrame, pl.Series | None] | None:
    try:
        return select_exact(frame, wanted)
    except (Exception, pl.exceptions.PanicException):
        return None


def _find_bad(frame: pl.DataFrame, wanted: Mapping[str, pl.Expr], failed: npt.NDArray[np.uint8], start: int) -> None:
    """Mark the rows that fail, by bisection."""
    if _select(frame, wanted) is not None:
        return
    if frame.height == 1:
        failed[start] = TRANSFORM_FAILED
        return
    half = frame.height // 2
    _find_bad(frame.slice(0, half), wanted, failed, start)
    _find_bad(frame.slice(half), wanted, failed, start + half)

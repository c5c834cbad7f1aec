"""A flow's vectorised steps over frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.expressions import expression
from aggregations.flow import Divert, Filter, Map, Step
from envelope import Reason

CANNOT = "an expression cannot be evaluated for it"


@dataclass(slots=True)
class Stepped:
    """What steps left of a frame.

    Attributes:
        frame: The rows that are still there.
        rejected: Rows taken out, as frames of what they were, with reason and detail.
        filtered: Number of rows that a filter left out.
    """

    frame: pl.DataFrame
    rejected: list[tuple[pl.DataFrame, Reason, str]] = field(default_factory=list)
    filtered: int = 0

    def keep(self, mask: npt.NDArray[np.bool_]) -> pl.DataFrame:
        """Keep the rows of the mask; return the others."""
        if mask.all():
            return self.frame.clear()
        kept = pl.Series(mask)
        others = self.frame.filter(~kept)
        self.frame = self.frame.filter(kept)
        return others

    def reject(self, bad: npt.NDArray[np.bool_], reason: Reason, detail: str) -> None:
        """Take out the rows of the mask."""
        if bad.any():
            self.rejected.append((self.keep(~bad), reason, detail))


def apply_columns(steps: Sequence[Step], frame: pl.DataFrame) -> Stepped:
    """Run filters, maps and diversions over a frame, in order."""
    stepped = Stepped(frame)
    for step in steps:
        match step:
            case Filter(keep):
                stepped.filtered += stepped.keep(_predicate(stepped, keep)).height
            case Divert(when):
                stepped.reject(_predicate(stepped, when), Reason.DIVERTED, "the flow diverts it")
            case Map(columns, _):
                found = evaluated(stepped, {name: expression(of) for name, of in columns.items()})
                stepped.frame = stepped.frame.with_columns(found.get_columns())
            case _:
                raise AssertionError(f"{type(step).__name__} is not vectorised")
    return stepped


def evaluated(stepped: Stepped, wanted: Mapping[str, pl.Expr]) -> pl.DataFrame:
    """Evaluate expressions for every row; rows for which one raises are rejected."""
    found, bad = evaluate_columns(stepped.frame, wanted)
    if bad.any():
        stepped.reject(bad, Reason.TRANSFORM_FAILED, CANNOT)
        found = found.filter(~pl.Series(bad))
    return found


def evaluate_columns(frame: pl.DataFrame, wanted: Mapping[str, pl.Expr]) -> tuple[pl.DataFrame, npt.NDArray[np.bool_]]:
    """Evaluate expressions for every row.

    Returns:
        The columns of `wanted`, and a mask of the rows for which one raised; these are null.
    """
    bad = np.zeros(frame.height, np.bool_)
    selection = [one.alias(name) for name, one in wanted.items()]
    if not selection:
        return pl.DataFrame(), bad
    found = _select(frame, selection)
    if found is not None:
        return found, bad
    _find_bad(frame, selection, bad, 0)
    good = np.flatnonzero(~bad)
    found = _select(frame[good], selection)
    assert found is not None, "every row was tried alone or with others"
    places = np.full(frame.height, -1)
    places[good] = np.arange(len(good))
    if not len(good):
        return found.clear(frame.height), bad
    return found[np.maximum(places, 0)].with_columns(pl.when(~pl.Series(bad)).then(pl.all())), bad


def _predicate(stepped: Stepped, of: object) -> npt.NDArray[np.bool_]:
    assert isinstance(of, str | pl.Expr)
    found = evaluated(stepped, {"predicate": expression(of)})
    return found.get_column("predicate").fill_null(value=False).to_numpy()


def _select(frame: pl.DataFrame, selection: Sequence[pl.Expr]) -> pl.DataFrame | None:
    try:
        # The extra column keeps the height where every expression is a literal.
        return frame.select(pl.int_range(pl.len()).alias("_height"), *selection).drop("_height")
    except (Exception, pl.exceptions.PanicException):
        return None


def _find_bad(frame: pl.DataFrame, selection: Sequence[pl.Expr], bad: npt.NDArray[np.bool_], start: int) -> None:
    """Mark the rows that fail, by halving."""
    if _select(frame, selection) is not None:
        return
    if frame.height == 1:
        bad[start] = True
        return
    half = frame.height // 2
    _find_bad(frame.slice(0, half), selection, bad, start)
    _find_bad(frame.slice(half), selection, bad, start + half)

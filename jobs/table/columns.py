"""The columns of states as a table: the fields of the stage's fold, and what the store knows of each state.

Names of the second kind begin with an underscore, as those of a record's own columns do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import polars as pl

from aggregations.definition.aggregates import Count, FieldAggregate, First, Last, Maximum, Mean, Minimum, Total
from aggregations.definition.aggregates_exact import Variance
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Stage
from aggregations.errors import DefinitionChangedError, FlowError
from jobs.table.view import View
from persistence.errors import show_key

KEY: Final = "_key"
STATE: Final = "state"
"""The column of a fold in plain Python: its result as JSON."""

_HELD: Final = pl.List(pl.Struct({"lane": pl.String, "held": pl.List(pl.String), "floor": pl.String, "used": pl.Int64}))
_PENDING: Final = pl.List(pl.Struct({"lane": pl.String, "position": pl.String}))


def _text(key: bytes) -> str | None:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return None


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _held(view: View) -> list[dict[str, Any]]:
    return [
        {
            "lane": name,
            "held": [_json(position) for position in history.held],
            "floor": None if history.floor is None else _json(history.floor),
            "used": history.used,
        }
        for name, history in sorted(view.histories.lanes.items())
    ]


def _pending(view: View) -> list[dict[str, Any]]:
    holes = view.histories.holes
    return [{"lane": name, "position": _json(position)} for name in sorted(holes) for position in sorted(holes[name])]


_Column = tuple[pl.DataType, Callable[[View], Any]]
_METADATA: Final[Mapping[str, _Column]] = {
    KEY: (pl.String(), lambda view: _text(view.key)),
    "_key_bytes": (pl.Binary(), lambda view: view.key),
    "_version": (pl.Int64(), lambda view: view.version),
    "_epoch": (pl.Int64(), lambda view: view.epoch),
    "_batch": (pl.Int64(), lambda view: view.batch),
    "_written_by": (pl.Datetime("us", "UTC"), lambda view: _maybe(_time, view.written_by_ms)),
    "_definition": (pl.String(), lambda view: view.definition),
    "_lanes": (pl.Int64(), lambda view: len(view.histories.lanes)),
    "_holes": (pl.Int64(), lambda view: sum(map(len, view.histories.holes.values()))),
}
_WINDOW: Final[Mapping[str, _Column]] = {
    "_window_start": (pl.Datetime("us", "UTC"), lambda view: view.window and view.window.start),
    "_window_end": (pl.Datetime("us", "UTC"), lambda view: view.window and view.window.end),
}
_HISTORIES: Final[Mapping[str, _Column]] = {"_histories": (_HELD, _held), "_pending": (_PENDING, _pending)}


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a stage's states, and how each is made of a state.

    Attributes:
        where: Flow and stage, for errors.
        of: Type of each column, and the function that makes its value.
    """

    where: str
    of: Mapping[str, _Column]

    @classmethod
    def of_stage(cls, stage: Stage, where: str, *, histories: bool = False) -> "Columns":
        """The columns of a stage.

        A field whose type the flow's definition does not tell, because a function makes the values that it reads,
        contains JSON.

        Args:
            stage: The stage.
            where: Flow and stage, for errors.
            histories: With the positions that each state holds.

        Raises:
            FlowError: A field has the name of one of the other columns.
        """
        fold = stage.aggregate.fold
        fields: dict[str, _Column] = {STATE: (pl.String(), lambda view: _maybe(_json, view.state))}
        if isinstance(fold, Fields):
            types = stage.input_types()
            fields = {name: _of_field(name, field, types.get(name)) for name, field in fold.fields.items()}
        known = {**({} if stage.aggregate.window is None else _WINDOW), **_METADATA}
        if taken := sorted(fields.keys() & {**known, **_HISTORIES}.keys()):
            raise FlowError(
                f"{where}: a table has a column {taken[0]} of its own; rename the field, or read the states as JSON"
            )
        known |= _HISTORIES if histories else {}
        return cls(where, {KEY: known.pop(KEY), **fields, **known})

    @property
    def schema(self) -> pl.Schema:
        """Names and types."""
        return pl.Schema({name: dtype for name, (dtype, _) in self.of.items()})

    def frame(self, views: Sequence[View]) -> pl.DataFrame:
        """States as a frame.

        Raises:
            DefinitionChangedError: A state of an earlier definition has a value of another type.
        """
        return pl.DataFrame([self._series(name, views) for name in self.of])

    def _series(self, name: str, views: Sequence[View]) -> pl.Series:
        dtype, value = self.of[name]
        values = [value(view) for view in views]
        try:
            return pl.Series(name, values, dtype, strict=True)
        except (TypeError, OverflowError, pl.exceptions.PolarsError):
            first = next(view for view, one in zip(views, values, strict=True) if not _fits(one, dtype))
            raise DefinitionChangedError(
                f"{self.where}, key {show_key(first.key)}: column {name} is {dtype}, and this state of an earlier "
                "definition has a value of another type. Read the states as JSON (headwater inspect --json)"
            ) from None


def _of_field(name: str, field: FieldAggregate, of: pl.DataType | None) -> _Column:
    dtype = _type_of(field, of)
    if dtype is None:
        return pl.String(), lambda view: None if view.state is None else _maybe(_json, view.state[name])
    if dtype.is_float():
        return dtype, lambda view: None if view.state is None else _maybe(float, view.state[name])
    return dtype, lambda view: None if view.state is None else view.state[name]


def _type_of(field: FieldAggregate, of: pl.DataType | None) -> pl.DataType | None:
    """Type of a field's result; None if it is not known."""
    if isinstance(field, Count):
        return pl.Int64()
    if isinstance(field, Mean | Variance):
        return pl.Float64()
    if of is None or type(field) not in (Total, Minimum, Maximum, First, Last):
        return None
    if of.is_float():
        return pl.Float64()
    if of == pl.String or (of == pl.Boolean and type(field) is not Total):
        return of
    if type(field) is Total:
        return pl.Int64()
    if of == pl.UInt64:
        return pl.Decimal(20, 0)
    return pl.Int64() if of.is_integer() and of not in (pl.Int128, pl.UInt128) else None


def _maybe(function: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else function(value)


def _fits(value: Any, dtype: pl.DataType) -> bool:
    try:
        pl.Series([value], dtype=dtype, strict=True)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        return False
    return True

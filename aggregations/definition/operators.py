"""The steps of a flow, and the checks that are possible before it runs."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.expressions import Expression, columns_of, describe_expression, parsed, text_of
from aggregations.definition.fields import Fields
from aggregations.definition.fingerprint import describe_callable, describe_object
from aggregations.definition.folds import Fold, check_state
from aggregations.definition.integers import select_exact
from aggregations.definition.system import SYSTEM_COLUMNS
from aggregations.definition.windows import Window
from aggregations.errors import FlowError
from envelope import EnvelopeError
from envelope.dedup.eviction import LANES

Predicate: TypeAlias = Expression | Callable[[Element[Any]], bool]
Key: TypeAlias = Expression | Callable[[Element[Any]], str | bytes | int | None]


def is_columnar(step: object) -> bool:
    """Whether a step's argument is a column name or an expression: the vectorised path."""
    return isinstance(step, str | pl.Expr)


@dataclass(frozen=True, slots=True)
class _Deciding:
    """A step that determines which elements reach the following stages.

    Attributes:
        definition: Canonical text: part of the definition of every following stage.
    """

    definition: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once, where the flow is written: a worker that gets it pickled may not have the source.
        given = [getattr(self, one.name) for one in fields(self) if one.init]
        object.__setattr__(self, "definition", " ".join([type(self).__name__.lower(), *map(_described, given)]))


@dataclass(frozen=True, slots=True)
class Filter(_Deciding):
    """Keeps the elements for which the predicate is true; null counts as false."""

    keep: Predicate


@dataclass(frozen=True, slots=True)
class Map(_Deciding):
    """Adds or replaces columns by expressions, or replaces each element's value by a function's result."""

    columns: Mapping[str, Expression] = field(default_factory=dict)
    function: Callable[[Element[Any]], Any] | None = None


@dataclass(frozen=True, slots=True)
class FlatMap(_Deciding):
    """Makes a collection of each element, by a function or of a list column; it is folded as a whole or not at all."""

    items: Expression | Callable[[Element[Any]], Iterable[Any]]

    @property
    def column(self) -> str:
        """The column that becomes the item; empty if a function makes the items."""
        return "" if callable(self.items) else parsed(self.items).meta.output_name()


@dataclass(frozen=True, slots=True)
class Divert(_Deciding):
    """Sends the elements for which the predicate is true to the dead-letter topic."""

    when: Predicate


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A stage: a fold per key.

    Attributes:
        name: Name of the stage.
        key: Key of its states.
        fold: `Fields(...)` or an instance of a class with `zero` and `fold`.
        co_partitioned: Records of one key are in one partition of the topic: no shuffle is needed. First stage only.
        history: Positions remembered per lane of a state; None for 32, or 1,024 on a lane with records without a key.
        lanes: Lanes with a history per state.
        emit: Makes a collection from each accepted element and the state after it; None forwards the element itself.
        store: URL of the store if no other is bound at run time.
        window: A state for each window of event time; None for one state per key.
        definition: Canonical text of key, fold and window.
        emitting: Canonical text of `emit`, key and fold; empty when each element is forwarded unchanged.
    """

    name: str
    key: Key
    fold: Fields | Fold[Any]
    co_partitioned: bool = True
    history: int | None = None
    lanes: int = LANES
    emit: Callable[[Element[Any], Any], Iterable[Any]] | None = None
    store: str = ""
    window: Window | None = None
    definition: str = field(init=False, repr=False)
    emitting: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Once, where the flow is written: a worker that gets it pickled may not have the source.
        fold = self.fold.describe() if isinstance(self.fold, Fields) else describe_object(self.fold)
        window = "" if self.window is None else f"\n{self.window.definition}"
        object.__setattr__(self, "definition", f"{_described(self.key)}\n{fold}{window}")
        # The emitted values may depend on the state.
        emitting = "" if self.emit is None else f"{self.definition}\nemit {_described(self.emit)}"
        object.__setattr__(self, "emitting", emitting)

    @property
    def overlaps(self) -> bool:
        """Whether an element may belong to several windows."""
        return self.window is not None and self.window.each > 1

    @property
    def passing(self) -> str:
        """Canonical text of what determines which elements are passed on, and with which value; empty for all, unchanged."""
        if self.emitting or self.window is None:
            return self.emitting
        return self.window.definition


def definition_of(steps: Iterable[object], source: str) -> str:
    """Hash of everything that determines a stage's states: a state with another hash is never continued silently.

    Compatible changes do not affect it: outputs, the store, the sizes of histories.

    Args:
        steps: The flow's steps up to and including the stage. Steps before the stage count if they determine which
            elements reach it, and with which value: filters, maps, flat-maps, diversions, and stages that emit.
        source: Canonical text of the source, `Topic.definition`: it decides the lanes and positions of its elements.
    """
    *before, stage = steps
    assert isinstance(stage, Aggregate)
    texts = [one.passing if isinstance(one, Aggregate) else getattr(one, "definition", "") for one in before]
    lanes = f"co_partitioned {stage.co_partitioned}"  # without it every lane names the partition that was read
    return _hash("\n".join([source, *filter(None, texts), lanes, stage.definition]))


def source_definition(source: str) -> str:
    """Hash of the source of a flow without a stage: it decides the lineage of everything that the flow publishes."""
    return _hash(source)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _described(argument: object) -> str:
    """Canonical text of a step's argument: expressions, functions, or columns by name."""
    if isinstance(argument, str | pl.Expr):
        return describe_expression(argument)
    if isinstance(argument, Mapping):
        return "{" + ", ".join(f"{name}={_described(of)}" for name, of in sorted(argument.items())) + "}"
    return "" if argument is None else describe_callable(argument)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Publish:
    """Produces every element that arrives here, with its chain, to a topic."""

    topic: str
    key: Key | None = None
    value: Callable[[Element[Any]], bytes] | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class PublishStates:
    """Produces the states that a batch changed, as snapshots, to a topic."""

    topic: str


Step: TypeAlias = Filter | Map | FlatMap | Divert | Publish


Schema: TypeAlias = Mapping[str, pl.DataType] | None
"""Columns and their types; None when a callable determines the value."""


def schema_after(step: object, schema: Schema) -> Schema:
    """The columns after a step, given the columns `schema` before it.

    Raises:
        FlowError: A column is missing, or types do not fit.
    """
    match step:
        case Map(columns, None) if schema is not None:
            new = types_of({name: parsed(of) for name, of in columns.items()}, schema)
            return {**schema, **new}
        case FlatMap(str() | pl.Expr() as items) if schema is not None:
            return {**schema, step.column: _item_type(items, schema)}
        case Map() | FlatMap():
            return None
        case Aggregate(emit=emit) if emit is not None:
            return None
        case _:
            return schema


def check_columns(step: Step | Aggregate, schema: Mapping[str, pl.DataType]) -> None:
    """Plan a step's expressions, so that missing columns and wrong types are reported when the flow is defined.

    Raises:
        FlowError: A column is missing, types do not fit, or an aggregate does not accept the type of a field's input.
    """
    match step:
        case Filter(argument) | Divert(argument) if isinstance(argument, str | pl.Expr):
            dtype = types_of({"": parsed(argument)}, schema)[""]
            if dtype not in (pl.Boolean, pl.Null):
                raise FlowError(f"{text_of(argument)} is of type {dtype}, not Boolean")
        case Map(_, None) | FlatMap(str() | pl.Expr()):
            schema_after(step, schema)
        case Publish(key=key) if isinstance(key, str | pl.Expr):
            _check_key(key, schema)
        case Aggregate(key=key, fold=fold):
            if isinstance(key, str | pl.Expr):
                _check_key(key, schema)
            if isinstance(fold, Fields):
                fold.check(types_of(fold.inputs(), schema))


def check_fold(fold: object) -> None:
    """Check that a stage can use a fold, and that a fold in plain Python starts from a state.

    Raises:
        FlowError: It is not a fold, its `zero` raises, or a JSON round trip would change what `zero` returns.
    """
    if isinstance(fold, type) or not isinstance(fold, Fields | Fold):
        got = f"the class {fold.__name__}" if isinstance(fold, type) else type(fold).__name__
        raise FlowError(
            f"the fold must be Fields(...) or an instance of a class with zero() and fold(state, element); got {got}"
        )
    if isinstance(fold, Fields):
        return
    try:
        check_state(fold.zero())
    except Exception as error:  # user code may raise anything
        detail = error.detail if isinstance(error, EnvelopeError) else type(error).__name__
        raise FlowError(f"zero() of its fold does not return a state: {detail}") from error


def types_of(wanted: Mapping[str, pl.Expr], schema: Mapping[str, pl.DataType]) -> dict[str, pl.DataType]:
    """Result types of expressions over the columns of `schema`.

    Raises:
        FlowError: A column is missing, or types do not fit.
    """
    missing = columns_of(wanted.values()) - set(schema) - SYSTEM_COLUMNS.keys()
    if missing:
        raise FlowError(f"no column {', '.join(sorted(missing))}; the columns are {', '.join(sorted(schema))}")
    try:
        return dict(select_exact(pl.DataFrame(schema={**schema, **SYSTEM_COLUMNS}), wanted)[0].schema)
    except FlowError:
        raise
    except (Exception, pl.exceptions.PanicException) as error:
        raise FlowError(f"an expression does not fit the columns: {type(error).__name__}: {error}") from error


def _item_type(items: Expression, schema: Mapping[str, pl.DataType]) -> pl.DataType:
    dtype = types_of({"": parsed(items)}, schema)[""]
    if not isinstance(dtype, pl.List):
        raise FlowError(f"{text_of(items)} is of type {dtype}, not a list")
    return pl.Series(dtype=dtype).explode().dtype


def _check_key(key: Expression, schema: Mapping[str, pl.DataType]) -> None:
    dtype = types_of({"": parsed(key)}, schema)[""]
    if not (dtype.is_integer() or dtype in (pl.String, pl.Binary, pl.Null)):
        raise FlowError(f"the key is of type {dtype}; use text, bytes or an integer")


def is_vectorised(step: Step | Aggregate) -> bool:
    """Whether a step needs no Python call per element."""
    return not calls_of(step)


def keeps_columns(step: Step | Aggregate) -> bool:
    """Whether the columns after a step are known: no function replaces the elements' values."""
    match step:
        case Map(_, function):
            return function is None
        case Aggregate(emit=emit):
            return emit is None
        case FlatMap(items):
            return is_columnar(items)
        case _:
            return True


def calls_of(step: Step | Aggregate) -> str:
    """What a step calls for each element in Python, as text; empty for a vectorised step."""
    match step:
        case Filter(argument) | Divert(argument):
            return "" if is_columnar(argument) else "its function"
        case Map(_, function):
            return "" if function is None else "its function"
        case FlatMap(items):
            return "" if is_columnar(items) else "its function"
        case Publish():
            return "the encoding of its messages"
        case Aggregate(key=key, fold=fold, emit=emit):
            called = {
                "its key": not is_columnar(key),
                "its fold": not isinstance(fold, Fields),
                "emit": emit is not None,
            }
            return ", ".join(name for name, calls in called.items() if calls)


def expressions_of(step: Step | Aggregate | PublishStates) -> list[pl.Expr]:
    """Every expression of a step."""
    match step:
        case Filter(argument) | Divert(argument) | FlatMap(argument) | Publish(key=argument):
            arguments = [argument]
        case Map(columns):
            arguments = list(columns.values())
        case Aggregate(key=key, fold=fold):
            arguments = [key, *(fold.inputs().values() if isinstance(fold, Fields) else ())]
        case _:
            arguments = []
    return [parsed(one) for one in arguments if isinstance(one, str | pl.Expr)]

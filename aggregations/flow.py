"""`Flow`: one immutable definition of a streaming aggregation, for every runner."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

import polars as pl

from aggregations.element import Element
from aggregations.errors import FlowError
from aggregations.expressions import Expression, columns_of, expression, name_of
from aggregations.fields import Fields, foldable
from aggregations.folds import Fold, describe
from aggregations.source import Topic
from envelope.windows import LANES, WINDOW

T = TypeVar("T")
U = TypeVar("U")

Predicate: TypeAlias = Expression | Callable[[Element[Any]], bool]
Key: TypeAlias = Expression | Callable[[Element[Any]], str | bytes | int | None]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def is_columnar(step: object) -> bool:
    """Whether a step's argument is a column name or an expression: the vectorised path."""
    return isinstance(step, str | pl.Expr)


@dataclass(frozen=True, slots=True)
class Filter:
    """Keeps the elements for which the predicate is true; null counts as false."""

    keep: Predicate


@dataclass(frozen=True, slots=True)
class Map:
    """Adds or replaces columns by expressions, or makes a new value of each element by a function."""

    columns: Mapping[str, Expression] = field(default_factory=dict)
    function: Callable[[Element[Any]], Any] | None = None


@dataclass(frozen=True, slots=True)
class FlatMap:
    """Makes a collection of values of each element; the collection is folded whole or not at all."""

    function: Callable[[Element[Any]], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class Divert:
    """Sends the elements for which the predicate is true to the dead-letter topic."""

    when: Predicate


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A stage: a fold per key.

    Attributes:
        name: Name of the stage.
        key: What it is keyed by.
        fold: `Fields(...)` or a class with `zero` and `fold`.
        co_partitioned: Records of one key are in one partition of the topic: no shuffle is needed. First stage only.
        window: Positions remembered per lane of a state.
        lanes: Lanes with a window per state.
        emit: Makes a collection of each accepted element and the state after it; None forwards the element itself.
        store: URL of the store when nothing else is bound at run time.
    """

    name: str
    key: Key
    fold: Fields | Fold[Any]
    co_partitioned: bool = True
    window: int = WINDOW
    lanes: int = LANES
    emit: Callable[[Element[Any], Any], Iterable[Any]] | None = None
    store: str = ""

    @property
    def definition(self) -> str:
        """Hash of key and fold: a state of another hash is never continued silently."""
        key = str(expression(self.key)) if isinstance(self.key, str | pl.Expr) else name_of(self.key)
        fold = self.fold.describe() if isinstance(self.fold, Fields) else describe(self.fold)
        return hashlib.sha256(f"{key}\n{fold}".encode()).hexdigest()[:16]


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


@dataclass(frozen=True, slots=True)
class Stage:
    """One keyed aggregation with the steps that lead to it.

    Attributes:
        index: Number of the stage in the flow, from 0.
        before: Steps between the stage before, or the source, and this one.
        aggregate: The aggregation.
        columnar: Everything up to and including the fold is vectorised.
        snapshots: Topics that its changed states are published to.
    """

    index: int
    before: tuple[Step, ...]
    aggregate: Aggregate
    columnar: bool
    snapshots: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The aggregation's name."""
        return self.aggregate.name

    @property
    def fans_out(self) -> bool:
        """Whether one record may reach this stage as several elements."""
        return any(isinstance(step, FlatMap) for step in self.before)


@dataclass(frozen=True)
class Flow(Generic[T]):
    """A source, steps and keyed aggregations, in order. Every method returns a new flow.

    Supported: column names and polars expressions (vectorised), and plain callables on `Element`
    (per message), for keys, filters, maps and diversions; both give the same answer.
    Not supported: several sources, joins, and expressions over several rows.

    Attributes:
        name: Name of the flow: part of every state's identity.
        steps: What was added, in order.
        topic: The source; None before `source` was called.
    """

    name: str
    steps: tuple[Step | Aggregate | PublishStates, ...] = ()
    topic: Topic | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise FlowError(f"{self.name!r} is no name: use letters, digits, '_', '.' and '-', at most 100")

    def source(self, topic: Topic) -> "Flow[Mapping[str, Any]]":
        """Read a topic."""
        if self.topic is not None:
            raise FlowError(f"flow {self.name!r} has a source already")
        return replace(self, topic=topic)  # type: ignore[return-value]

    def filter(self, keep: Predicate) -> "Flow[T]":
        """Keep the elements for which `keep` is true."""
        _check(keep)
        return self._with(Filter(keep))

    def map(self, function: Callable[[Element[T]], U] | None = None, **columns: Expression) -> "Flow[U]":
        """Make a new value of every element, or add columns: `map(late=pl.col("arr_delay") > 15)`."""
        if (function is None) == (not columns):
            raise FlowError("map() takes either one function or columns by name")
        for one in columns.values():
            expression(one)
        return self._with(Map(columns, function))  # type: ignore[return-value]

    def flat_map(self, function: Callable[[Element[T]], Iterable[U]]) -> "Flow[U]":
        """Make a collection of every element. The order of its items must not differ from run to run."""
        return self._with(FlatMap(function))  # type: ignore[return-value]

    def divert(self, when: Predicate) -> "Flow[T]":
        """Send the elements for which `when` is true to the dead-letter topic."""
        _check(when)
        return self._with(Divert(when))

    def aggregate(
        self,
        name: str,
        key: Key,
        fold: Fields | Fold[Any],
        *,
        co_partitioned: bool = True,
        window: int = WINDOW,
        lanes: int = LANES,
        emit: Callable[[Element[Any], Any], Iterable[Any]] | None = None,
        store: str = "",
    ) -> "Flow[T]":
        """Fold the elements of every key into a state, and pass each accepted element on. See `Aggregate`."""
        if not _NAME.fullmatch(name):
            raise FlowError(f"{name!r} is no name of a stage: use letters, digits, '_', '.' and '-', at most 100")
        if any(isinstance(step, Aggregate) and step.name == name for step in self.steps):
            raise FlowError(f"flow {self.name!r} has a stage {name!r} already")
        if window < 1 or lanes < 1:
            raise FlowError(f"stage {name!r}: window and lanes must be at least 1")
        if not isinstance(fold, Fields | Fold):
            raise FlowError(f"stage {name!r}: the fold must be Fields(...) or have zero() and fold(state, element)")
        _check(key)
        return self._with(Aggregate(name, key, fold, co_partitioned, window, lanes, emit, store))

    def publish(
        self, topic: str, *, key: Key | None = None, value: Callable[[Element[T]], bytes] | None = None, name: str = ""
    ) -> "Flow[T]":
        """Produce every element to `topic` as an envelope whose chain says where it came from.

        Args:
            topic: Target topic.
            key: Key of the output; None keeps the record's.
            value: Payload of the output; None writes the element's value as JSON.
            name: Name of this passage in the chain (`via`); the flow's name when empty.
        """
        if key is not None:
            _check(key)
        return self._with(Publish(topic, key, value, name or self.name))

    def publish_states(self, topic: str) -> "Flow[T]":
        """Produce the states of the stage before that each batch changed, as snapshots: the newest wins."""
        if not self.steps or not isinstance(self.steps[-1], Aggregate | PublishStates):
            raise FlowError("publish_states() comes right behind an aggregate()")
        return replace(self, steps=(*self.steps, PublishStates(topic)))

    def _with(self, step: Step | Aggregate) -> "Flow[T]":
        if self.topic is None:
            raise FlowError(f"flow {self.name!r} needs a source() first")
        if self.schema is not None:
            _checked(step, self.schema)
        return replace(self, steps=(*self.steps, step))

    @cached_property
    def schema(self) -> dict[str, pl.DataType] | None:
        """Columns and dtypes behind the last step; None where a callable decides."""
        if self.topic is None:
            return None
        schema = dict(self.topic.schema)
        for step in self.steps:
            if isinstance(step, Map) and step.function is None:
                schema = dict(_evaluated(step, schema, keep=True).schema)
            elif isinstance(step, FlatMap | Map) or (isinstance(step, Aggregate) and step.emit is not None):
                return None
        return schema

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The keyed aggregations, upstream first.

        Raises:
            FlowError: There is none.
        """
        stages: list[Stage] = []
        before: list[Step] = []
        columnar = True
        for step in self.steps:
            if isinstance(step, PublishStates):
                stages[-1] = replace(stages[-1], snapshots=(*stages[-1].snapshots, step.topic))
            elif isinstance(step, Aggregate):
                columnar = columnar and _vectorised(step)
                stages.append(Stage(len(stages), tuple(before), step, columnar))
                before = []
            else:
                columnar = columnar and _vectorised(step)
                before.append(step)
        if not stages:
            raise FlowError(f"flow {self.name!r} has no aggregate()")
        return tuple(stages)

    @cached_property
    def tail(self) -> tuple[Step, ...]:
        """Steps behind the last aggregation."""
        last = max(i for i, step in enumerate(self.steps) if isinstance(step, Aggregate))
        return tuple(step for step in self.steps[last + 1 :] if not isinstance(step, PublishStates | Aggregate))

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            FlowError: There is none; the text lists those that there are.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise FlowError(f"flow {self.name!r} has no stage {name!r}; it has {', '.join(s.name for s in self.stages)}")

    @cached_property
    def scatters(self) -> bool:
        """Whether items of one record may be folded by different tasks of one stage."""
        spread = False
        for stage in self.stages:
            spread = spread or stage.fans_out
            if spread:
                return True
            spread = stage.aggregate.emit is not None
        return False

    @cached_property
    def is_columnar(self) -> bool:
        """Whether every step is vectorised: on Spark a flow takes one path as a whole."""
        return self.stages[-1].columnar and all(_vectorised(step) for step in self.tail)

    @cached_property
    def columns(self) -> frozenset[str] | None:
        """Payload columns that the flow reads; None when a callable may read any of them."""
        if not self.is_columnar:
            return None
        return columns_of(one for step in self.steps for one in _expressions(step))

    def describe(self) -> str:
        """Draw the flow, one step a line, with the path that each takes."""
        lines = [f"{self.name}", f"  source     {self.topic.name if self.topic else '(none)'}"]
        columnar = True
        for step in self.steps:
            if isinstance(step, PublishStates):
                lines.append(f"  states to  {step.topic}")
                continue
            columnar = columnar and _vectorised(step)
            path = "vectorised" if columnar else "per message"
            lines.append(f"  {type(step).__name__.lower():10s} {_summary(step):50s} {path}".rstrip())
        return "\n".join(lines)


def _checked(step: Step | Aggregate, schema: Mapping[str, pl.DataType]) -> None:
    """Evaluate a step's expressions over no rows: what is missing or does not fit shows at once.

    Raises:
        FlowError: A column is missing, types do not fit, or a field reads what no aggregate takes.
    """
    evaluated = _evaluated(step, schema)
    match step:
        case Filter() | Divert() if evaluated.width and not evaluated.dtypes[0].is_(pl.Boolean):
            raise FlowError(f"{_text_of(step)} gives {evaluated.dtypes[0]}, not true or false")
        case Aggregate(name=name, fold=Fields() as fields):
            foldable((field, dtype) for field, dtype in evaluated.schema.items() if field in fields.inputs())
            key = evaluated.schema.get("key of the stage")
            if key is not None and not (key.is_integer() or key in (pl.String, pl.Binary, pl.Null)):
                raise FlowError(f"stage {name!r}: its key is of type {key}; use text, bytes or an integer")


def _evaluated(step: Step | Aggregate, schema: Mapping[str, pl.DataType], *, keep: bool = False) -> pl.DataFrame:
    wanted: dict[str, pl.Expr] = {}
    match step:
        case Filter(argument) | Divert(argument) if isinstance(argument, str | pl.Expr):
            wanted = {"predicate": expression(argument)}
        case Map(columns, None):
            wanted = {name: expression(of) for name, of in columns.items()}
        case Aggregate(key=key, fold=fold):
            wanted = dict(fold.inputs()) if isinstance(fold, Fields) else {}
            if isinstance(key, str | pl.Expr):
                wanted["key of the stage"] = expression(key)
    missing = columns_of(wanted.values()) - set(schema)
    if missing:
        raise FlowError(f"no column {', '.join(sorted(missing))}; there are {', '.join(sorted(schema))}")
    frame = pl.DataFrame(schema=dict(schema))
    try:
        return frame.with_columns(**wanted) if keep else frame.select(**wanted)
    except Exception as error:
        raise FlowError(f"an expression does not fit the columns: {type(error).__name__}: {error}") from error


def _text_of(step: Filter | Divert) -> str:
    return _text(step.keep if isinstance(step, Filter) else step.when)


def _check(argument: Any) -> None:
    if isinstance(argument, str | pl.Expr):
        expression(argument)
    elif not callable(argument):
        raise FlowError(f"a {type(argument).__name__} is neither a column, an expression nor a callable")


def _vectorised(step: Step | Aggregate) -> bool:
    match step:
        case Filter(argument) | Divert(argument):
            return is_columnar(argument)
        case Map(_, function):
            return function is None
        case Aggregate():
            return is_columnar(step.key) and isinstance(step.fold, Fields) and step.emit is None
        case FlatMap() | Publish():
            return False


def _expressions(step: Step | Aggregate | PublishStates) -> list[pl.Expr]:
    match step:
        case Filter(argument) | Divert(argument) if isinstance(argument, str | pl.Expr):
            return [expression(argument)]
        case Map(columns, None):
            return [expression(one) for one in columns.values()]
        case Aggregate(key=key, fold=Fields() as fields) if isinstance(key, str | pl.Expr):
            return [expression(key), *fields.inputs().values()]
        case _:
            return []


def _summary(step: Step | Aggregate) -> str:
    match step:
        case Filter(argument) | Divert(argument):
            return _text(argument)
        case Map(columns, function):
            return ", ".join(columns) if function is None else name_of(function)
        case FlatMap(function):
            return name_of(function)
        case Publish(topic):
            return topic
        case Aggregate():
            fold = step.fold.describe() if isinstance(step.fold, Fields) else name_of(type(step.fold))
            return f"{step.name} by {_text(step.key)}: {fold}"


def _text(argument: Predicate | Key) -> str:
    return str(argument) if isinstance(argument, str | pl.Expr) else name_of(argument)

"""The steps of a flow, and the checks that are possible before it runs."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.emit import Emit, Emitting
from aggregations.definition.expiry import Expiry
from aggregations.definition.expressions import Expression, describe_expression, parsed
from aggregations.definition.fields import Fields
from aggregations.definition.fingerprint import describe_callable
from aggregations.definition.folds import Fold, check_state
from aggregations.definition.judging import Judging, describe_fold
from aggregations.definition.lookups import Lookup
from aggregations.definition.sessions import SessionWindow
from aggregations.definition.windows import Window
from aggregations.errors import FlowError
from envelope import EnvelopeError
from envelope.dedup.eviction import LANES
from envelope.filters.arrival import Filter as FilterRule

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
        fold: `Fields(...)` or an instance of a class with `zero` and `fold`; in a stage of `deduplicate` a `Judging`.
        co_partitioned: Records of one key are in one partition of the topic: no shuffle is needed. First stage only.
        history: Positions remembered per lane of a state; None for 32, or 1,024 on a lane with records without a key.
        lanes: Lanes with a history per state.
        emit: Columns of the state before and after each accepted element, or a function that makes a collection from the
            element and the state after it; None forwards the element itself.
        store: URL of the store if no other is bound at run time.
        window: A state for each window of event time, or sessions in the state of each key; None for one state per key.
        expiry: How long a state stays without an event; None for ever.
        definition: Canonical text of key, fold, window and expiry.
        emitting: Canonical text of `emit`, key and fold; empty when each element is forwarded unchanged.
    """

    name: str
    key: Key
    fold: Fields | Fold[Any]
    co_partitioned: bool = True
    history: int | None = None
    lanes: int = LANES
    emit: Emitting | None = None
    store: str = ""
    window: Window | SessionWindow | None = None
    expiry: Expiry | None = None
    definition: str = field(init=False, repr=False)
    emitting: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Once, where the flow is written: a worker that gets it pickled may not have the source.
        fold, times = describe_fold(self.fold), "" if self.times is None else f"\n{self.times.definition}"
        object.__setattr__(self, "definition", fold if self.rule else f"{_described(self.key)}\n{fold}{times}")
        # The emitted values may depend on the state.
        if isinstance(self.emit, Emit):
            assert isinstance(self.fold, Fields)
            emitted = self.emit.describe(self.fold)
        else:
            emitted = _described(self.emit)
        object.__setattr__(self, "emitting", f"{self.definition}\nemit {emitted}" if emitted else "")

    @property
    def rule(self) -> FilterRule[Any] | None:
        """The filter that decides which elements are passed on; None in a stage that aggregates."""
        return self.fold.rule if isinstance(self.fold, Judging) else None

    @property
    def times(self) -> Window | SessionWindow | Expiry | None:
        """What decides by the event times of elements; None in a stage that does not read them."""
        return self.window if self.window is not None else self.expiry

    @property
    def renewed(self) -> SessionWindow | Expiry | None:
        """Whose due times each event puts off; None if a state has the due time with which it was created, or none."""
        return self.expiry if self.sessions is None else self.sessions

    @property
    def makes(self) -> bool:
        """Whether a function makes the values that it passes on."""
        return self.emit is not None and not isinstance(self.emit, Emit)

    @property
    def emits_state(self) -> bool:
        """Whether what it passes on may depend on the state."""
        return self.makes or (isinstance(self.emit, Emit) and bool(self.emit.fields))

    @property
    def sessions(self) -> SessionWindow | None:
        """Its windows if they are sessions; else None."""
        return self.window if isinstance(self.window, SessionWindow) else None

    def zero(self) -> Any:
        """The state of a key before anything was folded."""
        return self.fold.zero() if self.sessions is None else []

    def inputs(self) -> dict[str, pl.Expr]:
        """Expressions to evaluate per element: those of `Fields.inputs`, and the columns that `Emit` reads."""
        wanted = self.fold.inputs() if isinstance(self.fold, Fields | Judging) else {}
        emit = self.emit
        return (
            {**wanted, **{emit_input(name): pl.col(name) for name in emit.read}} if isinstance(emit, Emit) else wanted
        )

    @property
    def overlaps(self) -> bool:
        """Whether an element may belong to several windows."""
        return self.window is not None and self.window.each > 1

    @property
    def passing(self) -> str:
        """Canonical text of what determines which elements are passed on, and with which value; empty for all, unchanged."""
        if self.rule is not None:
            return self.definition
        if self.emitting or self.times is None:
            return self.emitting
        return self.times.definition


def emit_input(column: str) -> str:
    """Name among a stage's inputs of a column that `Emit` reads; not valid as the name of a field."""
    return f"\0{column}"


def definition_of(steps: Iterable[object], source: str, *, final: bool = False) -> str:
    """Hash of everything that determines a stage's states: a state with another hash is never continued silently.

    Compatible changes do not affect it: outputs, the store, the sizes of histories.

    Args:
        steps: The flow's steps up to and including the stage. Steps before the stage count if they determine which
            elements reach it, and with which value: filters, maps, flat-maps, diversions, and stages that emit.
        source: Canonical text of the source, `Topic.definition`: it decides the lanes and positions of its elements.
        final: Its windows are published when they close.
    """
    *before, stage = steps
    assert isinstance(stage, Aggregate)
    texts = [one.passing if isinstance(one, Aggregate) else getattr(one, "definition", "") for one in before]
    lanes = f"co_partitioned {stage.co_partitioned}"  # without it every lane names the partition that was read
    closes = [PublishStates("", PublishOn.CLOSE).definition] if final else []
    return _hash("\n".join([source, *filter(None, texts), lanes, stage.definition, *closes]))


def source_definition(source: str) -> str:
    """Hash of a source of a flow without a stage: it decides the lineage of everything that the flow publishes of it."""
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
    """Produces every element that arrives here, with its chain, to a topic.

    Attributes:
        topic: The topic; if `topics` is not empty, what chooses one of them for each element.
        key: Key of the output; None keeps the record's key.
        value: Makes the payload; None writes the element's value as JSON.
        name: Name of this hop in the chain (`via`), with the names of the branches that the step is in.
        topics: The topics to choose from.
    """

    topic: Expression | Callable[[Element[Any]], str]
    key: Key | None = None
    value: Callable[[Element[Any]], bytes] | None = None
    name: str = ""
    topics: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        """Every topic that it may produce to."""
        return self.topics or (str(self.topic),)


@dataclass(frozen=True, slots=True)
class Branch:
    """Steps beside the main line, which never rejoin it.

    Attributes:
        name: Its name.
        steps: Its steps.
        when: Elements for which it is true leave the main line; None passes every element to both.
        pieces: Names of reusable pieces in `steps`, with the steps that each begins and ends at.
        definition: Canonical text of what leaves the main line; empty if every element continues on it.
    """

    name: str
    steps: "tuple[Step, ...]"
    when: Predicate | None = None
    pieces: tuple[tuple[str, int, int], ...] = ()
    definition: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        taken = "" if self.when is None else f"branch {_described(self.when)}"
        object.__setattr__(self, "definition", taken)


class PublishOn(StrEnum):
    """When the states of a stage are published."""

    UPDATE = "update"
    """After each batch, those that it changed."""
    CLOSE = "close"
    """The state of a window or session once, when all partitions have closed it."""


@dataclass(frozen=True, slots=True)
class PublishStates:
    """Produces states of the stage before it, as snapshots, to a topic.

    Attributes:
        topic: The topic.
        on: When they are produced.
    """

    topic: str
    on: PublishOn = PublishOn.UPDATE

    @property
    def targets(self) -> tuple[str, ...]:
        """Every topic that it produces to."""
        return (self.topic,)

    @property
    def definition(self) -> str:
        """Canonical text of what determines which elements are passed on: a published window takes no further one."""
        return "" if self.on is PublishOn.UPDATE else "publish on close"


def published_on(given: str, stage: Aggregate) -> PublishOn:
    """Read the argument `on=` of `publish_states`.

    Raises:
        FlowError: It is unknown, or the stage has no windows.
    """
    if given not in set(PublishOn):
        raise FlowError(f"on= takes one of {', '.join(PublishOn)}; got {given!r}")
    on = PublishOn(given)
    if on is PublishOn.CLOSE and stage.expiry is not None:
        raise FlowError(
            f"on='close' needs windows; stage {stage.name!r} has expire_after={str(stage.expiry)!r}. With "
            f"window=session({str(stage.expiry)!r}) each period of activity of a key is published once"
        )
    if on is PublishOn.CLOSE and stage.window is None:
        raise FlowError(f"on='close' needs windows; stage {stage.name!r} has none")
    return on


Step: TypeAlias = Filter | Map | FlatMap | Divert | Lookup | Publish | Branch


def flattened(steps: Iterable[Any]) -> Iterator[Any]:
    """The steps, and the steps of branches after each branch."""
    for step in steps:
        yield step
        if isinstance(step, Branch):
            yield from flattened(step.steps)


def publishes(steps: Iterable[object]) -> bool:
    """Whether any of these steps, or of their branches, publishes elements."""
    return any(isinstance(step, Publish) for step in flattened(steps))


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

"""`Flow`: one immutable definition of a streaming aggregation, for every runner."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from aggregations.definition.arguments import (
    check_callable,
    check_name,
    check_positive,
    check_type,
    located,
    topic_name,
)
from aggregations.definition.branches import Branching, check_topics
from aggregations.definition.deduplication import Deduplicating
from aggregations.definition.description import text_of_flow
from aggregations.definition.element import Element
from aggregations.definition.emit import Emitting, check_emit
from aggregations.definition.expiry import checked_expiry
from aggregations.definition.expressions import Expression, check_argument, check_column
from aggregations.definition.fields import Fields
from aggregations.definition.folds import Fold
from aggregations.definition.inputs import Input, check_merged, check_sources, merged_schema
from aggregations.definition.lookups import Lookup
from aggregations.definition.operators import (
    Aggregate,
    Divert,
    Filter,
    FlatMap,
    Key,
    Map,
    Predicate,
    Publish,
    PublishOn,
    PublishStates,
    Step,
    check_fold,
    flattened,
    is_columnar,
    published_on,
    publishes,
)
from aggregations.definition.paths import keeps_columns
from aggregations.definition.picture import picture
from aggregations.definition.reading import Reading
from aggregations.definition.schemas import Passed, Schema, check_columns, schema_after
from aggregations.definition.sessions import SessionWindow, check_window
from aggregations.definition.source import Topic, check_source
from aggregations.definition.stability import check_decisions, differing
from aggregations.definition.stages import Stage, definition_of_sources, definition_without_stage, published_after
from aggregations.definition.tables import Joining
from aggregations.definition.windows import Window
from aggregations.errors import FlowError
from envelope.dedup.eviction import LANES

if TYPE_CHECKING:
    from aggregations.engine.options import RunOptions
    from aggregations.report import Report
    from aggregations.run.plan import Plan
    from aggregations.spark.aggregator import Aggregator

__all__ = [
    "Aggregate",
    "Divert",
    "Filter",
    "FlatMap",
    "Flow",
    "Input",
    "Key",
    "Map",
    "Predicate",
    "Publish",
    "PublishStates",
    "Stage",
    "Step",
    "is_columnar",
]

T = TypeVar("T")
U = TypeVar("U")

END_OF_FLOW = "end"
"""Used as stage name for a record that fails after the last stage, and for the store of a flow without a stage."""


@dataclass(frozen=True)
class Flow(Branching[T], Deduplicating[T], Joining[T], Reading, Generic[T]):
    """Sources, steps and keyed aggregations, in order, or only steps. Every method returns a new flow.

    Supported: column names and polars expressions (vectorised), and plain callables on `Element`
    (per message), for keys, filters, maps and diversions; both give the same result.
    Not supported: expressions over several rows, and keys and other decisions by what differs between two deliveries of
    an event, such as `_offset`: see `aggregations.definition.stability`.

    Attributes:
        name: Name of the flow: part of every state's identity.
        steps: The steps added so far, in order; after a merge, those that all inputs go through.
        inputs: The sources; empty before `source` was called.
        branches: Names of the branches in which the next step is.
        pieces: Names of reusable pieces that `via` added, with the steps that each begins and ends at.
        alone: It is a part of a flow, which folds no table; see `parts`.
    """

    name: str
    steps: tuple[Step | Aggregate | PublishStates, ...] = ()
    inputs: tuple[Input, ...] = ()
    branches: tuple[str, ...] = ()
    pieces: tuple[tuple[str, int, int], ...] = ()
    alone: bool = False

    def __post_init__(self) -> None:
        check_name("flow", self.name)

    def source(self, topic: Topic, *more: Topic) -> "Flow[Mapping[str, Any]]":
        """Read one or several topics, each with its own payload, envelope and policies.

        The elements of several topics have the columns of all of them: a column that a topic does not have is null. A
        column that topics have with different types cannot be used; use `merge` to give it one type first.
        """
        if self.inputs:
            raise FlowError(f"flow {self.name!r} already has a source; read several with source(a, b) or merge()")
        for one in (topic, *more):
            check_source(one)
        check_sources(self.name, (topic, *more))
        return replace(self, inputs=tuple(map(Input, (topic, *more))))  # type: ignore[return-value]

    def merge(self, other: "Flow[U]") -> "Flow[T | U]":
        """Add the sources of another flow, each with the steps that its elements went through there.

        The steps of this flow so far apply to its own sources only, all further steps to the elements of both. The
        other flow's name is not used, except in the hops of what it publishes. Columns are as with several topics in
        `source`.
        """
        check_type("merge()", other, Flow, "another flow")
        for one in (self, other):
            if not one.inputs:
                raise FlowError(f"flow {one.name!r} has no source(): call it before merge()")
            if named := [step.name for step in one.steps if isinstance(step, Aggregate)]:
                raise FlowError(f"flow {one.name!r} has stage {named[0]!r}: call merge() before the first aggregate()")
        inputs = (*self.own_inputs, *other.own_inputs)
        check_sources(self.name, [one.topic for one in inputs])
        return replace(self, steps=(), inputs=inputs, pieces=())  # type: ignore[return-value]

    @property
    def own_inputs(self) -> tuple[Input, ...]:
        """The inputs with all steps so far; there is no stage yet."""
        steps = tuple(step for step in self.steps if not isinstance(step, Aggregate | PublishStates))
        return tuple(one.extended(steps, self.pieces) for one in self.inputs)

    def filter(self, keep: Predicate) -> "Flow[T]":
        """Keep the elements for which `keep` is true."""
        check_argument("filter()", keep)
        return self._with("filter()", Filter(keep))

    @overload
    def map(self, function: Callable[[Element[T]], U]) -> "Flow[U]": ...

    @overload
    def map(self, **columns: Expression) -> "Flow[Mapping[str, Any]]": ...

    def map(self, function: Any = None, **columns: Any) -> "Flow[Any]":
        """Replace every element's value, or add columns: `map(late=pl.col("arr_delay") > 15)`."""
        if (function is None) == (not columns):
            raise FlowError('map() takes either one function, or columns by name: map(total=pl.col("price") * 2)')
        if function is not None:
            check_callable("map()", function)
        for name, column in columns.items():
            check_column(f"map({name}=...)", column)
        if reserved := sorted(name for name in columns if name.startswith("_")):
            raise FlowError(f"map(): column names that begin with _ are reserved; rename {', '.join(reserved)}")
        return self._with("map()", Map(columns, function))

    @overload
    def flat_map(self, items: Callable[[Element[T]], Iterable[U]]) -> "Flow[U]": ...

    @overload
    def flat_map(self, items: Expression) -> "Flow[Mapping[str, Any]]": ...

    def flat_map(self, items: Any) -> "Flow[Any]":
        """Replace every element by a collection: the result of a function, or one element for each item of a list.

        With a column or an expression that gives a list, each item takes the place of the list in the column of that
        name, and the other columns stay. Null and an empty list give no element. The order of a function's items must
        be the same in every run.
        """
        check_argument("flat_map()", items)
        step = FlatMap(items)
        if step.column.startswith("_"):
            raise FlowError(
                f"flat_map(): column names that begin with _ are reserved; rename {step.column} with alias()"
            )
        return self._with("flat_map()", step)

    def divert(self, when: Predicate) -> "Flow[T]":
        """Send the elements for which `when` is true to the dead-letter topic."""
        check_argument("divert()", when)
        return self._with("divert()", Divert(when))

    def aggregate(
        self,
        name: str,
        key: Key,
        fold: Fields | Fold[Any],
        *,
        co_partitioned: bool = True,
        history: int | None = None,
        lanes: int = LANES,
        emit: Emitting | None = None,
        store: str = "",
        window: Window | SessionWindow | None = None,
        expire_after: str | None = None,
    ) -> "Flow[T]":
        """Fold the elements of every key into a state, and pass each accepted element on. See `Aggregate`."""
        check_name("stage", name)
        if self.branches:
            raise FlowError(
                f"branch {self.branches[-1]!r} cannot aggregate: publish to a topic that another flow folds"
            )
        if name == END_OF_FLOW:
            raise FlowError(f"stage name {name!r} is reserved for dead letters after the last stage; use another name")
        if name in {step.name for step in self.steps if isinstance(step, Aggregate)} | self.tables.keys():
            raise FlowError(f"flow {self.name!r} already has a stage {name!r}; choose another name")
        with located(f"stage {name!r}"):
            check_argument("key=", key)
            check_fold(fold)
            check_type("co_partitioned=", co_partitioned, bool, "True or False")
            check_positive("history=", 1 if history is None else history)
            check_positive("lanes=", lanes)
            if emit is not None:
                check_emit(emit, fold)
            check_type("store=", store, str, "the URL of a store")
            check_window(window, fold)
            expiry = checked_expiry(expire_after, window)
        stage = Aggregate(name, key, fold, co_partitioned, history, lanes, emit, store, window, expiry)
        return self._with(f"stage {name!r}", stage)

    def publish(
        self,
        topic: Expression | Callable[[Element[T]], str],
        *,
        topics: Sequence[str] = (),
        key: Key | None = None,
        value: Callable[[Element[T]], bytes] | None = None,
        name: str = "",
    ) -> "Flow[T]":
        """Produce every element to `topic` as an envelope whose chain gives its origin.

        Args:
            topic: Target topic. With `topics`: a column, an expression or a function that chooses one of them for each
                element. An element for which it chooses another one is a dead letter.
            topics: The topics to choose from.
            key: Key of the output; None keeps the record's key.
            value: Payload of the output; None writes the element's value as JSON.
            name: Name of this hop in the chain (`via`); the flow's name when empty. In a branch, the branch's name
                follows after a slash.
        """
        with located("publish()"):
            check_topics(topic, topics)
            if key is not None:
                check_argument("key=", key)
            if value is not None:
                check_callable("value=", value)
            check_type("name=", name, str, "text")
        processor = Publish(topic, key, value, "/".join([name or self.name, *self.branches]), tuple(topics))
        known = {(to, one.name) for one in flattened(self.every_step) if isinstance(one, Publish) for to in one.targets}
        if twice := [to for to in processor.targets if (to, processor.name) in known]:
            # Both would produce messages of the same lineage; downstream the second would be dropped as a duplicate.
            raise FlowError(
                f"flow {self.name!r} already publishes to {twice[0]} as {processor.name!r}: pass another name="
            )
        return self._with("publish()", processor)

    def aggregator(
        self,
        options: "RunOptions | None" = None,
        *,
        progress: "Callable[[Report], None] | None" = None,
        planned: "Callable[[Plan], None] | None" = None,
        **fields: Any,
    ) -> "Aggregator":
        """Return the function that folds the batches of a Spark stream: `foreachBatch(flow.aggregator(stores=...))`.

        Args:
            options: Options of the run.
            progress: Called after each commit with its report.
            planned: Called when the run begins, with the plan of each source.
            fields: Fields of `RunOptions`, instead of `options`.

        Raises:
            FlowError: The flow or the options cannot work.
        """
        from aggregations.engine.options import RunOptions
        from aggregations.spark.aggregator import Aggregator

        return Aggregator(self, RunOptions.given("aggregator", options, fields), progress=progress, planned=planned)

    def publish_states(self, topic: str, *, on: str = PublishOn.UPDATE) -> "Flow[T]":
        """Produce states of the previous stage as snapshots: the newest per key wins.

        Args:
            topic: Target topic.
            on: `update`: after each batch, the states that it changed. `close`: the state of each window or session
                once, when all partitions have closed it; it then takes no further element.
        """
        if not self.steps or not isinstance(self.steps[-1], Aggregate | PublishStates):
            raise FlowError("publish_states() must follow an aggregate() directly")
        with located("publish_states()"):
            topic_name(topic)
            stage = next(step for step in reversed(self.steps) if isinstance(step, Aggregate))
            return replace(self, steps=(*self.steps, PublishStates(topic, published_on(on, stage))))

    def _with(self, where: str, step: Step | Aggregate) -> "Flow[T]":
        if not self.inputs:
            raise FlowError(f"flow {self.name!r} has no source(): call it before {where}")
        with located(where):
            check_decisions(step, differing(self.inputs, self.steps))
            if not isinstance(self.schema, Passed):
                check_merged(step, self.inputs, self.schema, self.steps)
                check_columns(step, self.schema)
        return replace(self, steps=(*self.steps, step))

    @cached_property
    def schema(self) -> Schema:
        """Columns and dtypes after the last step; `Passed` when a callable determines the value."""
        return self._schema_at(len(self.steps))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The tables, then the keyed aggregations, upstream first.

        Raises:
            FlowError: The flow has no source, or neither an aggregation nor a publish step.
        """
        if not self.inputs:
            raise FlowError(f"flow {self.name!r} has no source()")
        if self.tables:
            return tuple(stage for part in self.parts for stage in part.stages)
        stages: list[Stage] = []
        before: list[Step] = []
        leading = tuple(step for one in self.inputs for step in one.steps)
        columnar, begins = all(map(keeps_columns, leading)), 0
        for i, step in enumerate(self.steps):
            if isinstance(step, PublishStates):
                continue
            columnar = columnar and keeps_columns(step)
            if isinstance(step, Aggregate):
                updates, closes = published_after(self.steps[i + 1 :])
                made = definition_of_sources(self.inputs, self.steps[: i + 1], final=bool(closes))
                schemas = self._schema_at(begins), self._schema_at(i)
                looks = any(isinstance(one, Lookup) for one in self.steps[:i])
                given = (tuple(before), step, columnar, made, updates, *schemas, leading, looks, closes)
                stages.append(Stage(len(stages), *given))
                before, begins, leading = [], i + 1, ()
            else:
                before.append(step)
        self._check_whole(aggregates=any(one.aggregate.rule is None for one in stages))
        return tuple(stages)

    @cached_property
    def tail(self) -> tuple[Step, ...]:
        """Steps after the last aggregation."""
        return tuple(step for step in self.steps[self._tail_start :] if not isinstance(step, PublishStates | Aggregate))

    @cached_property
    def tail_schema(self) -> Schema:
        """Columns before the first step of `tail`."""
        return self._schema_at(self._tail_start)

    @property
    def _tail_start(self) -> int:
        last = self.stages[-1].aggregate if self.stages else None
        return next((i + 1 for i, step in enumerate(self.steps) if step is last), 0)

    def _schema_at(self, count: int) -> Schema:
        schema: Schema = merged_schema(self.inputs)
        for step in self.steps[:count]:
            schema = schema_after(step, schema)
        return schema

    def after(self, stage: "Stage") -> frozenset[str]:
        """Names of the stages after a stage, and the end of the flow: where a redriven record may be bound for."""
        return frozenset((*(later.name for later in self.stages[stage.index + 1 :]), END_OF_FLOW))

    def up_to(self, stage: "Stage") -> tuple[str, ...]:
        """Names of a stage and of those before it."""
        return tuple(one.name for one in self.stages[: stage.index + 1])

    @cached_property
    def followed(self) -> frozenset[str]:
        """Names of the stages that are followed by other stages or by outputs."""
        ends = publishes(self.tail)
        return frozenset(stage.name for stage in (self.stages if ends else self.stages[:-1]))

    @cached_property
    def lists_holes(self) -> frozenset[str]:
        """Names of the stages whose holes the ledger lists even if they are not proven.

        They come after a stage that makes what it passes on from its state, and keeps the state for a dead letter; or
        before a filter, which notes what it skips while records are missing.
        """
        makers = [stage.index for stage in self.stages if stage.aggregate.emits_state]
        filters = [stage.index for stage in self.stages if stage.aggregate.rule is not None]
        first, last = min(makers, default=len(self.stages)), max(filters, default=0)
        return frozenset(stage.name for stage in self.stages if stage.index > first or stage.index < last)

    @cached_property
    def publishing(self) -> frozenset[str]:
        """Names of the stages with publish steps before them."""
        return frozenset(stage.name for stage in self.stages if stage.publishes_before)

    @cached_property
    def definitions(self) -> dict[str, str]:
        """Definition hash by stage, upstream first. A flow without a stage has that of its sources, under `end`."""
        found = {one.name: one.definition for one in self.stages}
        return found or {END_OF_FLOW: definition_without_stage(self.inputs)}

    @property
    def stage_names(self) -> tuple[str, ...]:
        """Names of the stages, upstream first; `end` for a flow without a stage, which has a store for its manifest."""
        return tuple(self.definitions)

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            FlowError: No stage has that name; the text lists the stages.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = (
            f"has {', '.join(self.stage_names)}" if self.stages else f"keeps no states; its store is {END_OF_FLOW!r}"
        )
        raise FlowError(f"flow {self.name!r} has no stage {name!r}; it {known}")

    @cached_property
    def scatters(self) -> bool:
        """Whether items of one record may be folded by different tasks of one stage."""
        makes = any(stage.aggregate.makes for stage in self.stages[:-1])
        return makes or any(stage.fans_out for stage in self.stages)

    def describe(self) -> str:
        """Describe the flow as text, one step a line: its method, its content and its path.

        The path is `vectorised`, also with Python for a part of the step, or `per message`: from the first function
        that replaces the elements' values. An aggregate there still judges positions as arrays (`verdicts vectorised`),
        unless it has an `Emit`.
        """
        return text_of_flow(self)

    def describe_svg(self, stores: Mapping[str, str] | None = None) -> str:
        """Describe the flow as a picture in SVG, readable on light and dark backgrounds.

        Args:
            stores: Text about the store by stage name, such as its URL without secrets.
        """
        return picture(self, stores or {})

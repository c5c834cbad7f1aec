"""The tables of a flow, and the parts that it is folded in: a batch reads one table, or the sources of the main line."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from aggregations.definition.arguments import check_name, check_type, located
from aggregations.definition.expressions import Expression, check_column
from aggregations.definition.lookups import LatestRow, Lookup, Missing, storable
from aggregations.definition.operators import Aggregate, flattened
from aggregations.definition.schemas import Passed
from aggregations.definition.source import Topic
from aggregations.errors import FlowError
from envelope import Tombstones

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow

T = TypeVar("T")

_KEY = "_key"


class Joining(Generic[T]):
    """The methods of `Flow` for tables.

    Attributes:
        alone: It is a part of a flow, which folds no table.
    """

    alone: bool

    @property
    def _this(self) -> "Flow[T]":
        return cast("Flow[T]", self)

    def lookup(
        self,
        table: str,
        topic: Topic,
        key: Expression,
        *,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        missing: Missing | str = Missing.NULL,
        store: str = "",
    ) -> "Flow[Mapping[str, Any]]":
        """Add columns of the row that a table has for each element: the latest record of a topic by its key.

        It follows an `aggregate`. All elements of a batch read the table as it was before the batch, however often the
        batch is repeated.

        Args:
            table: Name of the table, which is bound to a store like a stage. Several lookups may read one table.
            topic: The topic. It may be compacted; a tombstone deletes a row.
            key: Column or expression that gives the key to look up.
            columns: The table's columns to add, or their names by the names of the new columns; None for all numbers,
                texts and booleans. A table keeps the columns that are looked up.
            missing: What happens to an element whose key is null or has no row: `null`, `drop` or `dead_letter`.
            store: URL of the table's store if no other is bound at run time.
        """
        flow = self._this
        check_name("table", table)
        with located(f"lookup {table!r}"):
            check_type("topic", topic, Topic, 'a Topic, such as Topic("merchants", Merchant)')
            check_column("key=", key)
            check_type("store=", store, str, "the URL of a store")
            _check_place(flow, table, topic)
            step = Lookup(table, _as_table(topic), key, _columns(topic, columns), _policy(missing), store)
        return flow._with(f"lookup {table!r}", step)  # type: ignore[return-value]

    @cached_property
    def tables(self) -> "dict[str, Flow[Any]]":
        """The part that folds a table, by the table's name; empty for a part of a flow."""
        if self.alone:
            return {}
        flow = self._this
        lookups = [step for step in flattened(flow.steps) if isinstance(step, Lookup)]
        found: dict[str, Flow[Any]] = {}
        for one in lookups:
            read = {of for step in lookups if step.table == one.table for of in step.columns.values()}
            fold = LatestRow(tuple((name, str(one.topic.schema[name])) for name in sorted(read)))
            store = next((step.store for step in lookups if step.table == one.table and step.store), "")
            made = type(flow)(flow.name).source(one.topic)
            found[one.table] = made.aggregate(one.table, key=_KEY, fold=fold, store=store)
        return found

    @cached_property
    def parts(self) -> "tuple[Flow[Any], ...]":
        """What a batch may fold: each table, then the main line. A flow without a lookup has one part, itself."""
        if not self.tables:
            return (self._this,)
        return (*self.tables.values(), replace(self._this, alone=True))

    def part_of(self, topic: str) -> "Flow[Any]":
        """The part that reads a topic; of a flow with one source that one, whatever its name."""
        return next((part for part in self.parts[:-1] if topic in part.topics), self.parts[-1])


def _check_place(flow: "Flow[Any]", table: str, topic: Topic) -> None:
    """Check that a table can be looked up here.

    Raises:
        FlowError: It cannot.
    """
    if not any(isinstance(step, Aggregate) for step in flow.steps):
        raise FlowError(
            "it must follow an aggregate(): the table changes, and a copy of a record would look up another row. A stage "
            "before it drops the copies"
        )
    if isinstance(flow.schema, Passed):
        raise FlowError("a function determines the elements' values, which have no known columns; look up before it")
    if table == "end":
        raise FlowError("the name is reserved for dead letters after the last stage; choose another one for the table")
    names = [step.name for step in flow.steps if isinstance(step, Aggregate)]
    if table in names:
        raise FlowError("a stage has this name; choose another one for the table")
    if topic.name in {one.topic.name for one in flow.inputs}:
        raise FlowError(f"the flow reads {topic.name} as a source; a topic is either a source or a table")
    if topic.cluster != flow.cluster:
        raise FlowError("the table's topic has another cluster= than the sources; mirror it to their cluster")
    for step in flattened(flow.steps):
        if isinstance(step, Lookup) and (step.table == table) != (step.topic.name == topic.name):
            raise FlowError(
                f"table {step.table!r} is folded from topic {step.topic.name}; a table has one topic of its own"
            )
        if isinstance(step, Lookup) and step.table == table and step.topic != _as_table(topic):
            raise FlowError(f"topic {topic.name} is declared differently in another lookup of this table")


def _as_table(topic: Topic) -> Topic:
    """The topic as a table reads it: a tombstone arrives, unless it becomes a dead letter."""
    if topic.tombstones is not Tombstones.SKIP:
        return topic
    return Topic(
        topic.name,
        topic.payload,
        envelope=topic.envelope,
        siblings=topic.siblings,
        limits=topic.limits,
        cluster=topic.cluster,
        tombstones=Tombstones.ELEMENT,
        time=topic.time,
        ahead=topic.ahead,
        stable=topic.stable,
        retries=dict(topic.retries.topics),
    )


def _columns(topic: Topic, columns: object) -> dict[str, str]:
    known = storable(topic.schema)
    if not known:
        raise FlowError(
            f"topic {topic.name} has no column that a table can keep: declare its numbers, text and booleans"
        )
    if columns is None:
        found = {name: name for name in known}
    elif isinstance(columns, Mapping):
        found = dict(columns)
    else:
        check_type("columns=", columns, list | tuple, "a list of columns, or columns by new name")  # type: ignore[arg-type]
        assert isinstance(columns, Sequence)
        for name in columns:
            check_type("columns=", name, str, "names as text")
        found = {name: name for name in columns}
    for name, of in found.items():
        check_type("columns=", name, str, "names as text")
        if of not in known:
            raise FlowError(f"columns= names {of!r}; the columns of the table are {', '.join(known)}")
        if name.startswith("_"):
            raise FlowError(f"column names that begin with _ are reserved; rename {name}")
    return found


def _policy(missing: str) -> Missing:
    try:
        return Missing(missing)
    except ValueError as error:
        raise FlowError(f"missing= takes one of {', '.join(Missing)}; got {missing!r}") from error

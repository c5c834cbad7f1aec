"""The inputs of a flow: topics, each with the steps that only its elements go through, and the columns they share.

Behind the inputs an element has the columns of all of them. A column that its topic does not have is null. A column that
two inputs have with different types cannot be used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import polars as pl

from aggregations.definition.expressions import columns_of, parsed
from aggregations.definition.operators import Aggregate, Divert, Filter, FlatMap, Map, Step
from aggregations.definition.paths import expressions_of
from aggregations.definition.schemas import Passed, Schema, schema_after
from aggregations.definition.source import Topic
from aggregations.errors import FlowError
from envelope import Siblings

SiblingPolicy: TypeAlias = Siblings | Mapping[str, Siblings]
"""The policy of every source, or the policies by topic where they differ."""


@dataclass(frozen=True, slots=True)
class Input:
    """One source of a flow.

    Attributes:
        topic: The topic.
        steps: The steps that only its elements go through: those before `merge`.
        pieces: Names of the reusable pieces that `via` added, with the steps that each begins and ends at.
    """

    topic: Topic
    steps: tuple[Step, ...] = ()
    pieces: tuple[tuple[str, int, int], ...] = ()

    def extended(self, steps: Sequence[Step], pieces: Iterable[tuple[str, int, int]]) -> "Input":
        """The input with further steps."""
        size = len(self.steps)
        moved = ((name, begin + size, end + size) for name, begin, end in pieces)
        return Input(self.topic, (*self.steps, *steps), (*self.pieces, *moved))

    @property
    def schema(self) -> Schema:
        """Columns after its own steps."""
        schema: Schema = self.topic.schema
        for step in self.steps:
            schema = schema_after(step, schema)
        return schema


def check_sources(flow: str, topics: Sequence[Topic]) -> None:
    """Check that topics can be the sources of one flow.

    Raises:
        FlowError: One occurs twice, or they are in several clusters.
    """
    names = [topic.name for topic in topics]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FlowError(f"flow {flow!r} reads {', '.join(twice)} twice; name every source once")
    if len({topic.cluster for topic in topics}) > 1:
        raise FlowError(
            f"the sources of flow {flow!r} have different cluster= names; a flow reads from one Kafka cluster: mirror "
            "the other topics to it"
        )


def merged_schema(inputs: Sequence[Input]) -> Schema:
    """Columns of the elements of all inputs, in order of first appearance; `Passed` when a callable determines a value."""
    found: dict[str, pl.DataType] = {}
    schemas = [one.schema for one in inputs]
    for schema in schemas:
        found |= {name: dtype for name, dtype in schema.items() if name not in found}
    differing = conflicts(inputs) if len(inputs) > 1 else {}
    merged = {name: dtype for name, dtype in found.items() if name not in differing}
    return Passed(merged) if any(isinstance(one, Passed) for one in schemas) else merged


def conflicts(inputs: Sequence[Input]) -> dict[str, str]:
    """The columns that inputs have with different types, and where which type is."""
    kinds: dict[str, dict[str, pl.DataType]] = {}
    for one in inputs:
        for name, dtype in one.schema.items():
            kinds.setdefault(name, {})[one.topic.name] = dtype
    return {
        name: " and ".join(f"{dtype} in {topic}" for topic, dtype in of.items())
        for name, of in kinds.items()
        if len(set(of.values())) > 1
    }


def check_merged(
    step: Step | Aggregate, inputs: Sequence[Input], schema: Mapping[str, pl.DataType], before: Iterable[object]
) -> None:
    """Check what a step reads of several inputs.

    Args:
        step: A step that all inputs go through.
        inputs: The inputs.
        schema: Columns before the step.
        before: The steps before it that all inputs go through.

    Raises:
        FlowError: It reads a column of different types, or its key is a column that an input does not have.
    """
    if len(inputs) < 2:
        return
    differing = conflicts(inputs)
    for name in sorted(columns_of(expressions_of(step)) & differing.keys() - schema.keys()):
        raise FlowError(f"column {name} is {differing[name]}; give it one type with map() before merge()")
    key = step.key if isinstance(step, Aggregate) else None
    if not isinstance(key, str | pl.Expr) or not (plain := parsed(key)).meta.is_column():
        return
    name = plain.meta.output_name()
    lacking = [one.topic.name for one in inputs if not name.startswith("_") and name not in one.schema]
    if name in schema and lacking and name not in _defined(before):
        raise FlowError(
            f"the key is column {name}, and {', '.join(lacking)} has no such column; add it with map() before merge()"
        )


def _defined(steps: Iterable[object]) -> set[str]:
    """Columns that steps define, or on which they filter."""
    found: set[str] = set()
    for step in steps:
        match step:
            case Map(columns):
                found |= columns.keys()
            case FlatMap():
                found.add(step.column)
            case Filter() | Divert():
                found |= columns_of(expressions_of(step))
    return found


def siblings_of(policy: SiblingPolicy, topic: str) -> Siblings:
    """The policy of a topic."""
    return policy if isinstance(policy, Siblings) else policy[topic]

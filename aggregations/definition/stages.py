"""The stages of a flow, each with the steps that lead to it, and the hash of what determines its states."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import polars as pl

from aggregations.definition.fields import Fields
from aggregations.definition.inputs import Input
from aggregations.definition.operators import (
    Aggregate,
    FlatMap,
    PublishOn,
    PublishStates,
    Step,
    definition_of,
    publishes,
    source_definition,
)
from aggregations.definition.schemas import Passed, Schema, types_of

_BETWEEN: Final = "+"


@dataclass(frozen=True, slots=True)
class Stage:
    """One keyed aggregation with the steps that lead to it.

    Attributes:
        index: Number of the stage in the flow, from 0.
        before: Steps between the previous stage, or the source, and this one.
        aggregate: The aggregation.
        columnar: Everything up to and including the fold can be done on columns; functions get elements made of them.
        snapshots: Topics to which its changed states are published.
        final_snapshots: Topics to which the states of its windows are published when they close.
        schema: Columns before the first step of `before`.
        arriving: Columns after its last step.
        definition: Hash of everything that determines its states, for each source; see `definition_of_sources`.
        leading: Steps of single inputs, for the first stage of a flow with several.
        looks_up: A lookup comes before it, so the key of a record may be another one when it is redriven.
    """

    index: int
    before: tuple[Step, ...]
    aggregate: Aggregate
    columnar: bool
    definition: str
    snapshots: tuple[str, ...]
    schema: Schema
    arriving: Schema
    leading: tuple[Step, ...]
    looks_up: bool
    final_snapshots: tuple[str, ...]

    @property
    def name(self) -> str:
        """The aggregation's name."""
        return self.aggregate.name

    @property
    def fans_out(self) -> bool:
        """Whether one record may reach this stage as several elements."""
        steps = (*self.leading, *self.before)
        return self.aggregate.overlaps or any(isinstance(step, FlatMap) for step in steps)

    def fixed(self, indices: Sequence[int]) -> int:
        """How many of the indices of an arrival it had when the previous stage passed it on."""
        added = self.aggregate.overlaps + sum(isinstance(step, FlatMap) for step in self.before)
        return len(indices) - added if self.index else 0

    @property
    def publishes_before(self) -> bool:
        """Whether steps before it publish."""
        return publishes((*self.leading, *self.before))

    @property
    def state_topics(self) -> tuple[str, ...]:
        """Every topic to which its states are published."""
        return (*self.snapshots, *self.final_snapshots)

    def input_types(self) -> dict[str, pl.DataType]:
        """Types of its fields' inputs; empty when a callable determines the value, and for a fold in plain Python."""
        schema, fold = self.arriving, self.aggregate.fold
        return {} if isinstance(schema, Passed) or not isinstance(fold, Fields) else types_of(fold.inputs(), schema)


def definition_of_sources(inputs: Sequence[Input], steps: Sequence[object], *, final: bool = False) -> str:
    """The definition of a stage: a hash for each source, so that a flow may add a source to its stages.

    Args:
        inputs: The flow's inputs.
        steps: The steps that all inputs go through, up to and including the stage.
        final: The stage's windows are published when they close.
    """
    return _BETWEEN.join(
        definition_of([*one.steps, *steps], one.topic.definition, final=final) for one in _ordered(inputs)
    )


def definition_without_stage(inputs: Sequence[Input]) -> str:
    """The definition of a flow without a stage: a hash for each source, as for a stage."""
    return _BETWEEN.join(source_definition(one.topic.definition) for one in _ordered(inputs))


def _ordered(inputs: Sequence[Input]) -> list[Input]:
    return sorted(inputs, key=lambda one: one.topic.name)


def published_after(steps: Sequence[object]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The topics to which the steps directly after a stage publish its states: on update, and on close."""
    found = [*takewhile(lambda step: isinstance(step, PublishStates), steps)]
    topics = [tuple(one.topic for one in found if isinstance(one, PublishStates) and one.on is on) for on in PublishOn]
    return topics[0], topics[1]


def continues(definition: str, earlier: str) -> bool:
    """Whether a stage continues states of an earlier definition: it has every source that they were made from."""
    return set(earlier.split(_BETWEEN)) <= set(definition.split(_BETWEEN))

"""A stage of a flow, with the steps that lead to it."""

from dataclasses import dataclass

import polars as pl

from aggregations.definition.fields import Fields
from aggregations.definition.operators import Aggregate, FlatMap, Schema, Step, schema_after, types_of


@dataclass(frozen=True, slots=True)
class Stage:
    """One keyed aggregation with the steps that lead to it.

    Attributes:
        index: Number of the stage in the flow, from 0.
        before: Steps between the previous stage, or the source, and this one.
        aggregate: The aggregation.
        columnar: Everything up to and including the fold can be done on columns; functions get elements made of them.
        snapshots: Topics to which its changed states are published.
        schema: Columns before the first step of `before`; None when a callable determines the value.
        definition: Hash of everything that determines its states; see `operators.definition_of`.
    """

    index: int
    before: tuple[Step, ...]
    aggregate: Aggregate
    columnar: bool
    definition: str
    snapshots: tuple[str, ...] = ()
    schema: Schema = None

    @property
    def name(self) -> str:
        """The aggregation's name."""
        return self.aggregate.name

    @property
    def fans_out(self) -> bool:
        """Whether one record may reach this stage as several elements."""
        return self.aggregate.overlaps or any(isinstance(step, FlatMap) for step in self.before)

    def input_types(self) -> dict[str, pl.DataType]:
        """Types of its fields' inputs; empty when a callable determines the value, and for a fold in plain Python."""
        schema = self.schema
        for step in self.before:
            schema = schema_after(step, schema)
        fold = self.aggregate.fold
        return {} if schema is None or not isinstance(fold, Fields) else types_of(fold.inputs(), schema)

"""What a flow reads: its sources, and what its steps need of their records."""

from functools import cached_property
from typing import Any

import polars as pl

from aggregations.definition.expressions import columns_of, parsed
from aggregations.definition.inputs import Input, SiblingPolicy
from aggregations.definition.judging import Judging
from aggregations.definition.lookups import LatestRow
from aggregations.definition.operators import Aggregate, PublishStates, Step, publishes
from aggregations.definition.paths import expressions_of, is_vectorised
from aggregations.definition.source import Topic
from aggregations.definition.system import HEADERS, LISTS, SYSTEM_COLUMNS
from aggregations.errors import FlowError
from envelope import Tombstones


class Reading:
    """The part of `Flow` that describes what is read.

    Attributes:
        name: Name of the flow.
        inputs: Its sources.
        steps: The steps that the elements of all inputs go through.
    """

    name: str
    inputs: tuple[Input, ...]
    steps: tuple[Step | Aggregate | PublishStates, ...]

    @cached_property
    def tables(self) -> "dict[str, Any]":
        """The part that folds a table, by the table's name."""
        raise NotImplementedError

    @property
    def topic(self) -> Topic | None:
        """The source of a flow with one; None before `source` was called.

        Raises:
            FlowError: The flow has several.
        """
        if len(self.inputs) > 1:
            raise FlowError(f"flow {self.name!r} has several sources: {', '.join(self.topics)}")
        return self.inputs[0].topic if self.inputs else None

    @cached_property
    def topics(self) -> dict[str, Topic]:
        """The sources by name, in order, then the topics of tables."""
        found = {one.topic.name: one.topic for one in self.inputs}
        return {**found, **{name: topic for part in self.tables.values() for name, topic in part.topics.items()}}

    def source_of(self, topic: str) -> Topic:
        """The topic of that name; of a flow with one topic that one, whatever its name.

        Raises:
            FlowError: The flow has several topics, and none of that name.
        """
        if len(self.topics) == 1:
            return self.inputs[0].topic
        if topic not in self.topics:
            raise FlowError(f"flow {self.name!r} reads {', '.join(self.topics)}, not {topic}")
        return self.topics[topic]

    @property
    def cluster(self) -> str:
        """Name of the Kafka cluster of its sources."""
        return self.inputs[0].topic.cluster if self.inputs else ""

    @cached_property
    def siblings(self) -> SiblingPolicy:
        """What to do with messages of one root that no fan-out index tells apart."""
        policies = {name: topic.siblings for name, topic in self.topics.items()}
        return policies if len(set(policies.values())) > 1 else next(iter(policies.values()))

    @property
    def merges(self) -> bool:
        """Whether elements of several sources meet."""
        return len(self.inputs) > 1

    @cached_property
    def is_timed(self) -> bool:
        """Whether the event times of its records are noted."""
        stages = any(isinstance(step, Aggregate) and step.times is not None for step in self.steps)
        return stages or any(one.time is not None or one.skew is not None for one in self.topics.values())

    @property
    def publishes(self) -> bool:
        """Whether it publishes elements; those of one key must stay in order."""
        return publishes(self.every_step)

    @cached_property
    def filters_by_key(self) -> bool:
        """Whether a filter decides by the order of the records of a key."""
        folds = [step.fold for step in self.every_step if isinstance(step, Aggregate)]
        return any(isinstance(fold, Judging) and fold.by_key for fold in folds)

    @cached_property
    def repeats_batches(self) -> bool:
        """Whether a batch that was begun is repeated as it was: a filter decides by the order between partitions."""
        folds = [step.fold for step in self.every_step if isinstance(step, Aggregate)]
        return any(isinstance(fold, Judging) and fold.spans for fold in folds)

    @property
    def notes_batches(self) -> bool:
        """Whether the manifests name the ends of a batch before anything of it is published or persisted."""
        return bool(self.tables) or self.repeats_batches

    @cached_property
    def calls_functions(self) -> bool:
        """Whether a step calls Python for each element."""
        return not all(is_vectorised(step) for step in self.every_step if not isinstance(step, PublishStates))

    def _check_whole(self, *, aggregates: bool) -> None:
        """Check that the flow does something with its elements, and can read them.

        Raises:
            FlowError: It does not, or cannot.
        """
        if not aggregates and not self.publishes:
            raise FlowError(
                f"flow {self.name!r} does nothing with its elements: it needs an aggregate() or a publish()"
            )
        if not self.calls_functions and (elements := self.tombstone_topics) and self._key_reads_payload:
            raise FlowError(
                f"topic {elements[0]} passes tombstones to the flow as None, and the key of the first stage reads columns: "
                "key it by '_key' or by a function, or set tombstones='skip' or 'dead_letter'"
            )

    @property
    def _key_reads_payload(self) -> bool:
        """Whether the key of the first stage is an expression over columns of the payload."""
        key = next((step.key for step in self.steps if isinstance(step, Aggregate)), None)
        return isinstance(key, str | pl.Expr) and not columns_of([parsed(key)]) <= SYSTEM_COLUMNS.keys()

    @cached_property
    def columns(self) -> frozenset[str] | None:
        """Payload columns that the flow reads; None when a callable may read any of them."""
        return None if self.calls_functions else self._read.difference(SYSTEM_COLUMNS)

    @cached_property
    def system_lists(self) -> frozenset[str]:
        """Those of the columns `_headers` and `_chain` that expressions of the flow read."""
        return self._read & LISTS

    @cached_property
    def reads_stamps(self) -> bool:
        """Whether a step may read what an envelope says about its producer."""
        folds = [step.fold for step in self.every_step if isinstance(step, Aggregate)]
        return any(isinstance(fold, Judging) and fold.reads_stamps for fold in folds)

    @cached_property
    def reads_chains(self) -> bool:
        """Whether a step may read the chain of an element: a function, or the fold of a table."""
        return self.calls_functions or any(isinstance(getattr(one, "fold", None), LatestRow) for one in self.steps)

    @property
    def reads_headers(self) -> bool:
        """Whether a step may read the headers of records."""
        return self.calls_functions or HEADERS in self.system_lists

    @property
    def _read(self) -> frozenset[str]:
        steps = columns_of(one for step in self.every_step for one in expressions_of(step))
        return steps.union(*(topic.time_columns for topic in self.topics.values()))

    @property
    def every_step(self) -> tuple[Step | Aggregate | PublishStates, ...]:
        """The steps of every input, then those that all elements go through."""
        return (*(step for one in self.inputs for step in one.steps), *self.steps)

    @property
    def tombstone_topics(self) -> list[str]:
        """Topics whose tombstones are passed to the flow."""
        return [name for name, topic in self.topics.items() if topic.tombstones is Tombstones.ELEMENT]

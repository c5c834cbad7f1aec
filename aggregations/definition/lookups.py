"""Tables that a flow looks up: the fold that keeps the latest row of each key, and the step that reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import polars as pl

from aggregations.definition.element import Element
from aggregations.definition.expressions import Expression, describe_expression
from aggregations.errors import FlowError
from envelope import Position
from envelope.dedup.lineage import position_order
from envelope.limits import broker_id
from envelope.times import micros_of

if TYPE_CHECKING:
    from aggregations.definition.source import Topic

Row: TypeAlias = Mapping[str, Any]
"""A row of a table: column name to number, text, boolean or None."""


class Missing(StrEnum):
    """What happens to an element whose key the table does not have."""

    NULL = "null"
    """Its new columns are null."""
    DROP = "drop"
    """It is filtered."""
    DEAD_LETTER = "dead_letter"
    """It becomes a dead letter, `missing_entry`."""


@dataclass(frozen=True)
class LatestRow:
    """The fold of a table: the latest row of one key. A tombstone deletes it.

    Positions can only be compared within a lane. The state therefore keeps the latest row of every lane, and the row of
    the key is the one whose root record has the latest timestamp. A key has several lanes if its records came over
    several partitions, for example after partitions were added.

    Attributes:
        columns: Name and type of the columns that the flow looks up. A table with another one needs other states.
    """

    columns: tuple[tuple[str, str], ...]

    def zero(self) -> dict[str, list[Any]]:
        """No row."""
        return {}

    def fold(self, state: dict[str, list[Any]], element: Element[Any]) -> dict[str, list[Any]]:
        """The state with a further row. A dead letter of a former topic of this name has none."""
        line = element.lineage
        died, own = line.nodes[line.died], line.own
        of_broker = broker_id(died.topic_id)  # as of a branch of its log
        if died.topic == own.topic and of_broker and broker_id(own.topic_id) not in ("", of_broker):
            return state
        standing = line.standing(event_id=element.event_id)
        row = None if element.value is None else {name: element.value[name] for name, _ in self.columns}
        self.put(state, standing.lane, standing.position, _time_us(element), row)
        return state

    @staticmethod
    def put(state: dict[str, list[Any]], lane: str, position: Position, time_us: int, row: Row | None) -> None:
        """Keep a row, unless the state has a later one of its lane.

        Args:
            state: By lane: time in microseconds since 1970, position and row. It is changed.
            lane: Lane of the record.
            position: Its position.
            time_us: Timestamp of its root, in microseconds since 1970.
            row: The row; None for a tombstone.
        """
        known = state.get(lane)
        if known is None or position_order(tuple(known[1])) < position_order(position):
            state[lane] = [time_us, list(position), row]

    def result(self, state: dict[str, list[Any]]) -> Row | None:
        """The row; None if it was deleted."""
        found = [(time, position_order(tuple(at)), lane) for lane, (time, at, _) in state.items()]
        row: Row | None = state[max(found)[2]][2] if found else None
        return row


def _time_us(element: Element[Any]) -> int:
    """The timestamp of the root record, if it is known: it is the same in every delivery. Else the event time."""
    root = element.chain[0].timestamp_ms if element.chain else element.timestamp_ms
    return element.event_time_us if root is None else micros_of(root)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Adds columns of the row that a table has for each element.

    Attributes:
        table: Name of the table.
        topic: The topic that is folded into the table.
        key: The key to look up.
        columns: Column of the table by name of the new column.
        missing: What happens to an element whose key is null or has no row.
        store: URL of the table's store if no other is bound at run time.
        definition: Canonical text: part of the definition of every following stage.
    """

    table: str
    topic: "Topic"
    key: Expression
    columns: Mapping[str, str]
    missing: Missing = Missing.NULL
    store: str = ""
    definition: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        columns = ", ".join(f"{name}={of}" for name, of in sorted(self.columns.items()))
        text = f"lookup {self.topic.definition} by {describe_expression(self.key)}: {columns}, missing {self.missing}"
        object.__setattr__(self, "definition", text)

    @property
    def types(self) -> dict[str, pl.DataType]:
        """Types of the new columns."""
        return {name: self.topic.schema[of] for name, of in self.columns.items()}

    def check_free(self, schema: Mapping[str, pl.DataType]) -> None:
        """Check that the new columns replace no column of the element.

        Raises:
            FlowError: One would.
        """
        if taken := sorted(self.columns.keys() & schema.keys()):
            raise FlowError(
                f"the element already has a column {taken[0]}; give the table's column another name with "
                f'columns={{"NEW_NAME": "{self.columns[taken[0]]}"}}'
            )


def storable(schema: Mapping[str, pl.DataType]) -> tuple[str, ...]:
    """The columns that a table can keep: numbers, text and booleans."""
    return tuple(
        name
        for name, dtype in schema.items()
        if dtype.is_integer() or dtype.is_float() or dtype in (pl.String, pl.Boolean)
    )

"""Shuffle blocks between Spark's tasks: few rows, each a bundle.

A stage's output is divided by key into one bundle per task of the next stage, so a shuffle moves a
few rows instead of one per event, and Spark never parses them. Besides elements, bundles contain
waiting writes, reports, and failures.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

Row = tuple[int, tuple[int, int, bytes]]
"""A block as a record of Spark: its route as the key, then kind, stage and payload."""


class Kind(IntEnum):
    """Content of a block."""

    ELEMENTS = 0
    """Arrivals at a stage, packed by the flow's path."""
    WRITES = 1
    """States of a stage that wait until every stage after it is persisted."""
    OUTPUTS = 2
    """Outputs and dead letters for the task that produces them."""
    MARKS = 3
    """Marks that a stage's store acknowledged, for the tasks that persist the stages upstream of it."""
    KEPT = 4
    """Hashes of the keys whose states wait in a resident, for every other task that reads; none for its own task."""
    REPORT = 5
    """Report of a task."""
    FAILURE = 6
    """A task failed: no further task does anything."""


class Block(NamedTuple):
    """What one task sends to another.

    Attributes:
        route: Number of the task it goes to.
        kind: Its content.
        stage: Index of its stage.
        payload: The bundle.
    """

    route: int
    kind: Kind
    stage: int
    payload: bytes


def pack(blocks: Iterable[Block]) -> Iterator[Row]:
    """Yield the blocks as Spark's records."""
    for block in blocks:
        yield block.route, (int(block.kind), block.stage, block.payload)


def unpack(rows: Iterable[Row]) -> list[Block]:
    """Read blocks, in an order that does not depend on which task sent first."""
    return sorted(Block(route, Kind(kind), stage, payload) for route, (kind, stage, payload) in rows)

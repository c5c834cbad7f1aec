"""Shuffle blocks between Spark's tasks: few rows, each a bundle.

A stage's output is divided by key into one bundle per task of the next stage, so a shuffle moves a
few rows instead of one per event, and Spark never parses them. Besides elements, bundles contain
waiting writes, reports, and failures.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import google_crc32c
import pyarrow as pa

SCHEMA = "route int, kind int, stage int, payload binary"
"""Spark's schema of a block."""

_ARROW = pa.schema([("route", pa.int32()), ("kind", pa.int32()), ("stage", pa.int32()), ("payload", pa.binary())])


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
    REPORT = 4
    """Report of a task."""
    FAILURE = 5
    """A task failed: no further task does anything."""


class Block(NamedTuple):
    """One row between tasks.

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


def pack(blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
    """Yield the blocks as Arrow, one per batch: a bundle can be large."""
    for block in blocks:
        yield pa.record_batch(
            [
                pa.array([block.route], pa.int32()),
                pa.array([int(block.kind)], pa.int32()),
                pa.array([block.stage], pa.int32()),
                pa.array([block.payload], pa.binary()),
            ],
            schema=_ARROW,
        )


def unpack(batches: Iterable[pa.RecordBatch]) -> list[Block]:
    """Read blocks, in an order that does not depend on which task sent first."""
    blocks = [
        Block(row["route"], Kind(row["kind"]), row["stage"], row["payload"])
        for batch in batches
        for row in batch.to_pylist()
    ]
    return sorted(blocks)


def route_of(key: bytes, routes: int) -> int:
    """Number of the task that folds a key: the same in every process."""
    return int(google_crc32c.value(key)) % routes

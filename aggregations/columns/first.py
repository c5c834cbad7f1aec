"""Finds rows that may be copies of earlier records: `aggregations.per_message.ledger.Reading` for whole columns."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from aggregations.columns import schema
from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.batch import position_arrays
from aggregations.columns.order import positions_of
from aggregations.columns.signature import Signature
from aggregations.per_message.ledger import Doubt, Reading, highest
from envelope import EnvelopeError, Lineage, Node, Position
from envelope.dedup.lanes import group_of


class Unread(NamedTuple):
    """A record that could not be read.

    Attributes:
        own: Its coordinates.
        key: Its key.
        error: The reason, with the chain if it could be read.
        lineage: Its lineage, with the root's topic id.
    """

    own: Node
    key: bytes | None
    error: EnvelopeError
    lineage: Lineage


def may_be_copies(
    frame: pl.DataFrame, signatures: Sequence[Signature], seen: Mapping[str, Position] | None, doubt: Doubt
) -> tuple[Mask, dict[str, Position]]:
    """Mark the rows that may be copies, and find the highest position of every route.

    Args:
        frame: Rows of one topic-partition in order of offsets, with the system and position columns.
        signatures: By the codes of `_signature`.
        seen: Highest position read before, by route; None if nothing can be proven.
        doubt: Offsets below which records may have been folded before.

    Returns:
        The mask, and the highest position by route of this batch.
    """
    again = np.zeros(frame.height, np.bool_)
    read: dict[str, Position] = {}
    chained = [code for code, one in enumerate(signatures) if one.chained]
    for (topic, partition), offset in doubt.items():
        place = (pl.col(schema.TOPIC) == topic) & (pl.col(schema.PARTITION) == partition)
        again |= frame.select(place & (pl.col(schema.OFFSET) < offset)).to_series().to_numpy()
    if not chained or not frame.height:
        return again, read
    codes = frame.get_column(schema.SIGNATURE).to_numpy()
    positions = position_arrays(frame)
    keyless = frame.get_column(schema.KEY).is_null().to_numpy()
    groups = frozenset(map(group_of, seen or ()))
    routes: dict[str, list[int]] = {}
    for code in chained:
        one = signatures[code]
        if one.pass_through or seen is None:
            again[codes == code] = True
        else:
            routes.setdefault(one.rekeyed.lane, []).append(code)
    numbers = np.full(len(signatures), -1)
    for number, mine in enumerate(routes.values()):
        numbers[mine] = number
    route_of, missing = numbers[codes], np.array([one.missing for one in signatures])
    for number, (route, mine) in enumerate(routes.items()):
        rows = np.flatnonzero(route_of == number)
        if not len(rows):
            continue
        width = signatures[mine[0]].width
        before = seen.get(route) if seen is not None else None
        first, top = _rising([component[rows] for component in positions[:width]], before)
        read[route] = highest(
            {route: before} if before else {}, {route: positions_of(positions, rows[top : top + 1])[0]}
        )[route]
        unknown = seen is not None and route not in seen and signatures[mine[0]].rekeyed.group in groups
        again[rows] |= True if unknown else ~first | keyless[rows] | missing[codes[rows]]
    return again, read


def unread_may_be_copies(
    unread: Sequence[Unread],
    frame: pl.DataFrame,
    signatures: Sequence[Signature],
    reading: Reading,
    again: Mask,
) -> list[bool]:
    """Whether records that could not be read may be copies; marks the rows that may be copies of these records.

    Args:
        unread: The records, those of a partition in order of offsets, their chains with the root's topic id.
        frame: The readable rows.
        signatures: By the codes of `_signature`.
        reading: Reads the positions of these records, and of no others.
        again: The mask of the rows that may be copies; it is changed.
    """
    found: list[bool] = []
    codes, offsets = (frame.get_column(name).to_numpy() for name in (schema.SIGNATURE, schema.OFFSET))
    positions = position_arrays(frame)
    for one in unread:
        copy = reading.again(one.lineage, one.key)
        standing = one.lineage.standing(rekeyed=True) if one.lineage.edges and not one.lineage.pass_through else None
        for code, signature in enumerate(signatures) if standing else ():
            mine = np.flatnonzero(codes == code)
            if standing and len(mine) and signature.rekeyed.lane == standing.lane and not signature.pass_through:
                below, same = np.zeros(len(mine), np.bool_), np.ones(len(mine), np.bool_)
                for component, at in zip(positions[: signature.width], standing.position, strict=True):
                    below |= same & (component[mine] < int(at))
                    same &= component[mine] == int(at)
                earlier = offsets[mine] < one.own.offset
                copy = copy or bool((earlier & ~below).any())
                again[mine] |= ~earlier & (below | same)
        found.append(copy)
    return found


def _rising(positions: Sequence[Ints], before: Position | None) -> tuple[Mask, int]:
    """Rows above all earlier rows and above `before`, and the number of the highest row."""
    if before is not None:
        positions = [np.concatenate(([int(at)], component)) for at, component in zip(before, positions, strict=True)]
    rank = _ranks(positions)
    highest_so_far = np.maximum.accumulate(rank)
    first = np.ones(len(rank), np.bool_)
    first[1:] = rank[1:] > highest_so_far[:-1]
    if before is not None:
        first, rank = first[1:], rank[1:]
    return first, int(np.argmax(rank))


def _ranks(positions: Sequence[Ints]) -> Ints:
    """Ranks in the order of the positions, equal for equal positions."""
    if len(positions) == 1:
        return positions[0]
    spans = [int(component.max()) - int(component.min()) + 1 for component in positions]
    if np.prod([float(span) for span in spans]) < 2.0**62:
        packed = np.zeros(len(positions[0]), np.int64)
        for component, span in zip(positions, spans, strict=True):
            packed = packed * span + (component - int(component.min()))
        return packed
    order = np.lexsort(list(positions)[::-1])
    changed = np.zeros(len(order), np.int64)
    for component in positions:
        changed[1:] |= component[order][1:] != component[order][:-1]
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.cumsum(changed)
    return ranks

"""The hops of a batch as flat arrays, and the number of every row's route."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.signature import HopKind, Way
from envelope import EnvelopeError, Limits
from envelope.dedup.lineage import NO_INDEX
from envelope.limits import MAX_OFFSET, check_topic

_WIDE = 1 << 40
"""Codes are combined by multiplication up to this product, then renumbered."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Values as codes: `codes[i]` is the index of row i's value in `values`."""

    codes: Ints
    values: Sequence[Any]

    @classmethod
    def of(cls, array: pa.Array) -> "Coded":
        """Number the distinct values of an array without nulls, in order of first appearance."""
        coded = array.dictionary_encode()
        return cls(coded.indices.to_numpy().astype(np.int64), coded.dictionary.to_pylist())


def combined(parts: Sequence[tuple[Ints, int]], rows: int) -> tuple[Ints, Ints]:
    """Number the distinct combinations of codes.

    Args:
        parts: Codes, and one more than the highest of them.
        rows: Length of every array.

    Returns:
        One code per row, from 0 without gaps, and for each code a row with it.
    """
    codes, size = np.zeros(rows, np.int64), 1
    for part, most in parts:
        if most > 1:
            if size * most > _WIDE:
                codes, size = _dense(codes)
            codes, size = codes * most + part, size * most
    codes, size = _dense(codes)
    first = np.empty(size, np.int64)
    first[codes[::-1]] = np.arange(rows - 1, -1, -1)
    return codes, first


def _dense(codes: Ints) -> tuple[Ints, int]:
    if not len(codes) or not codes.any():
        return np.zeros(len(codes), np.int64), min(len(codes), 1)
    coded = pa.array(codes).dictionary_encode()
    return coded.indices.to_numpy().astype(np.int64), len(coded.dictionary)


@dataclass(frozen=True, slots=True)
class Hops:
    """Hops of all rows in one sequence. Row i has `counts[i]` hops, starting at `starts[i]`.

    Attributes:
        starts: First hop of every row.
        counts: Number of hops of every row.
        offsets: Offset of every hop; -1 if it has none.
        indices: Fan-out index of every hop; `NO_INDEX` if it has none.
        codes: Kind of every hop: everything except offset and index.
        kinds: The kinds, by code.
        sound: Whether the hops of a row are valid.
    """

    starts: Ints
    counts: Ints
    offsets: Ints
    indices: Ints
    codes: Ints
    kinds: Sequence[HopKind]
    sound: Mask

    @classmethod
    def of(cls, chains: pa.ListArray, limits: Limits) -> "Hops":
        """Flatten a column of chains.

        Args:
            chains: Lists of structs with those fields of the schema's `Hop` that are in a `HopKind`,
                and `offset`.
            limits: Limits for the length of a chain and of topic names.
        """
        bounds = chains.offsets.to_numpy().astype(np.int64)
        starts, counts = bounds[:-1] - bounds[0], np.diff(bounds)
        hops = chains.flatten()
        offsets = _numbers(hops.field("offset"), -1)
        partitions = _numbers(hops.field("partition"), -1)
        good = (offsets >= 0) & (offsets < MAX_OFFSET) & (partitions >= 0)
        topics = Coded.of(hops.field("topic"))
        legal = np.fromiter((_is_topic(topic, limits) for topic in topics.values), np.bool_, len(topics.values))
        if not legal.all():
            good &= legal[topics.codes]
        codes, kinds = _kinds(hops, topics, partitions)
        sound = counts <= limits.hops
        if not good.all():
            sound &= np.bincount(np.repeat(np.arange(len(counts)), counts), ~good, len(counts)) == 0
        return cls(starts, counts, offsets, _numbers(hops.field("index"), NO_INDEX), codes, kinds, sound)

    @classmethod
    def none(cls, rows: int) -> "Hops":
        """Return the hops of rows without hops."""
        zero = np.zeros(rows, np.int64)
        return cls(zero, zero, zero[:0], zero[:0], zero[:0], (), np.ones(rows, np.bool_))

    def routes(self, topic: pa.StringArray, partition: Ints) -> tuple[Ints, list[Way]]:
        """Number the routes.

        Args:
            topic: Own topic of every row.
            partition: Own partition of every row.

        Returns:
            Code of every row's route, and the routes by code.
        """
        topics, partitions = Coded.of(topic), Coded.of(pa.array(partition))
        parts = [(topics.codes, len(topics.values)), (partitions.codes, len(partitions.values))]
        parts += [
            (self._at(depth, self.codes) + 1, len(self.kinds) + 1) for depth in range(int(self.counts.max(initial=0)))
        ]
        codes, examples = combined(parts, len(self.counts))
        routes = []
        for row in examples.tolist():
            start = int(self.starts[row])
            steps = tuple(self.kinds[code] for code in self.codes[start : start + int(self.counts[row])].tolist())
            routes.append((topics.values[topics.codes[row]], int(partition[row]), steps))
        return codes, routes

    def root_offsets(self, own: Ints) -> Ints:
        """Return the root's offset of every row; `own` for a row without hops."""
        return np.where(self.counts > 0, self._at(0, self.offsets), own)

    def indices_at(self, depth: int, rows: Ints) -> Ints:
        """Return the fan-out index of hop `depth` of rows that have this hop."""
        return self.indices[self.starts[rows] + depth]

    def offsets_at(self, depth: int, rows: Ints) -> Ints:
        """Return the offset of hop `depth` of rows that have this hop."""
        return self.offsets[self.starts[rows] + depth]

    def _at(self, depth: int, of_hops: Ints) -> Ints:
        """Values of hop `depth` by row; -1 for a row without this hop."""
        deep = self.counts > depth
        if deep.all():
            return of_hops[self.starts + depth]
        values = np.full(len(self.counts), -1, np.int64)
        values[deep] = of_hops[self.starts[deep] + depth]
        return values


def _kinds(hops: pa.StructArray, topics: Coded, partitions: Ints) -> tuple[Ints, list[HopKind]]:
    names = [topics, *(Coded.of(hops.field(name)) for name in ("via", "topic_id", "cluster"))]
    numbers = Coded.of(pa.array(partitions))
    flags = [
        np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.int64)
        for column in (
            hops.field("rekeyed"),
            hops.field("pass_through"),
            hops.field("index").is_valid(),
            hops.field("keyless"),
        )
    ]
    parts = [(one.codes, len(one.values)) for one in (*names, numbers)] + [(flag, 2) for flag in flags]
    codes, examples = combined(parts, len(hops))
    kinds: list[HopKind] = []
    for at in examples.tolist():
        topic, via, topic_id, cluster = (one.values[one.codes[at]] for one in names)
        rekeyed, pass_through, indexed, keyless = (bool(flag[at]) for flag in flags)
        kinds.append((topic, int(partitions[at]), via, rekeyed, pass_through, indexed, topic_id, cluster, keyless))
    return codes, kinds


def _numbers(array: pa.Array, null: int) -> Ints:
    if array.null_count:
        array = pc.fill_null(array.cast(pa.int64()), null)
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(np.int64, copy=False)


def _is_topic(topic: str, limits: Limits) -> bool:
    try:
        check_topic(topic, limits)
    except EnvelopeError:
        return False
    return True

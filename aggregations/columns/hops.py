"""The hops of a batch as flat arrays, and the number of every row's route."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from aggregations.columns.arrays import Ints, arrow
from aggregations.columns.signature import HopKind, Way
from envelope.limits import OFFSET_BITS


@dataclass(frozen=True, slots=True)
class Own:
    """Numbers of the pairs of own topic and partition.

    Attributes:
        codes: Number of each row's pair.
        topics: Names of the topics. The number of a pair is the topic's, times the number of partitions, plus the
            partition's.
        partitions: Numbers of the partitions.
    """

    codes: Ints
    topics: pa.StringArray
    partitions: Sequence[int]

    @classmethod
    def of(cls, topic: pa.DictionaryArray, partition: Ints) -> "Own":
        """Number the pairs of a batch."""
        partitions = arrow(partition).dictionary_encode()
        codes = topic.indices.to_numpy().astype(np.int64) * len(partitions.dictionary)
        return cls(codes + partitions.indices.to_numpy(), topic.dictionary, partitions.dictionary.to_pylist())

    def __len__(self) -> int:
        return len(self.topics) * len(self.partitions)

    def names(self) -> pa.StringArray:
        """The topic of each pair."""
        return self.topics.take(arrow(np.repeat(np.arange(len(self.topics)), len(self.partitions))))

    def way(self, code: int, steps: tuple[HopKind, ...] = ()) -> Way:
        """The route of a record of this pair."""
        topic, partition = divmod(code, len(self.partitions))
        return self.topics[topic].as_py(), self.partitions[partition], steps


@dataclass(frozen=True, slots=True)
class Hops:
    """Hops of all rows in one sequence. Row i has `counts[i]` hops, starting at `starts[i]`.

    Attributes:
        starts: First hop of every row.
        counts: Number of hops of every row.
        offsets: Offset of every hop.
        epochs: Leader epoch of every hop; 0 if it has none.
        indices: Fan-out index of every hop; `NO_INDEX` if it has none.
    """

    starts: Ints
    counts: Ints
    offsets: Ints
    epochs: Ints
    indices: Ints

    @classmethod
    def none(cls, rows: int) -> "Hops":
        """Return the hops of rows without hops."""
        zero = np.zeros(rows, np.int64)
        return cls(zero, zero, zero[:0], zero[:0], zero[:0])

    def root_numbers(self, own: Ints) -> Ints:
        """Return the root of every row (`envelope.limits.root_number`); `own` for a row without hops."""
        deep = self.counts > 0
        first = self.starts if deep.all() else self.starts[deep]
        roots = self.offsets[first] | self.epochs[first] << OFFSET_BITS
        if deep.all():
            return roots
        values = own.copy()
        values[deep] = roots
        return values

    def indices_at(self, depth: int, rows: Ints) -> Ints:
        """Return the fan-out index of hop `depth` of rows that have this hop."""
        return self.indices[self.starts[rows] + depth]

    def offsets_at(self, depth: int, rows: Ints) -> Ints:
        """Return the offset of hop `depth` of rows that have this hop."""
        return self.offsets[self.starts[rows] + depth]


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes by number: those of `Own`, and others that continue a route with a hop.

    Attributes:
        own: The routes without hops.
        nodes: For each route the one before its last hop, and the kind of that hop. The first `len(own)` have none.
        kinds: Kinds of hops; see `read_envelopes`.
        data: The buffer in which their names are.
    """

    own: Own
    nodes: Any
    kinds: Any
    data: Any

    def way(self, number: int) -> Way:
        """One route."""
        steps: list[HopKind] = []
        while number >= len(self.own):
            before, kind = self.nodes[number].tolist()
            steps.append(self._kind(kind))
            number = before
        return self.own.way(number, tuple(reversed(steps)))

    def _kind(self, number: int) -> HopKind:
        from aggregations.columns.envelope_reading import INDEXED, KEYLESS, PASS_THROUGH, REKEYED

        *places, partition, flags = self.kinds[number].tolist()
        topic, via, topic_id, cluster = (
            self.data[start : start + length].tobytes().decode()
            for start, length in zip(places[::2], places[1::2], strict=True)
        )
        rekeyed, pass_through, indexed, keyless = (
            bool(flags & flag) for flag in (REKEYED, PASS_THROUGH, INDEXED, KEYLESS)
        )
        return topic, partition, via, rekeyed, pass_through, indexed, topic_id, cluster, keyless

"""The fast path for the usual record: a sealed envelope without headers that is forwarded unchanged."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from aggregations.columns.envelope_reading import read_envelopes
from aggregations.columns.hop_writing import FRAME_BYTES, append_hops
from envelope import Limits
from envelope.hops import HopWriter
from envelope.limits import DEFAULT_LIMITS
from jobs.republish.columns import Columns, columns_of
from jobs.republish.partition import Consumed
from persistence.kafka.array_producer import Spans, sizes_of, spans_of, texts_of

_MOST_HOPS: Final = 1024
"""Hops of a chain that compiled code reads."""
_MOST_PLACES: Final = 4096
"""Partitions, times leader epochs, whose bytes are kept."""
_NO_TOPIC: Final = (np.frombuffer(b"", np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64))
"""Of the one route without a hop. So no destination is accepted: it would have to be replaced."""
_ANY_TYPE: Final = np.frombuffer(b"", np.uint8)

_Place: TypeAlias = tuple[HopWriter | None, int | None]


class Express:
    """Forwards many records at once: compiled code checks the envelopes and appends the hops.

    The results are those of `Processor.process` for `identity`, byte for byte. Any irregular record takes the normal
    path, which also finds the reason code.

    Args:
        known: Topics that were checked and that are neither read nor written here.
        most_bytes: Maximum size of an output's key and value, in bytes.
        limits: Limits of envelopes.
    """

    def __init__(self, known: set[str], most_bytes: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self._known = known
        self._most_bytes = most_bytes
        most = (limits.message_bytes, limits.payload_bytes, min(limits.hops - 1, _MOST_HOPS), limits.topic_chars)
        self._limits = np.array(most, np.int64)
        self._forget()

    def _forget(self) -> None:
        self._places: dict[_Place, int] = {}
        self._parts: list[bytes] = []
        self._spans = spans_of(self._parts)

    def runs(self, messages: Sequence[Consumed], writers: Mapping[tuple[str, int], HopWriter]) -> Iterator[Columns]:
        """Return what to produce for runs of usual messages; see `Columns.runs`."""
        return self.passed_on(columns_of(messages), writers).runs(len(messages))

    def each(self, messages: Sequence[Consumed], writers: Mapping[tuple[str, int], HopWriter]) -> list[bytes | None]:
        """Return the value to produce for each message; None for one that takes the normal path."""
        made = self.passed_on(columns_of(messages), writers)
        values: list[bytes | None] = [None] * len(messages)
        for row, value in zip(made.rows.tolist(), texts_of(made.values), strict=True):
            values[row] = value
        return values

    def passed_on(self, given: Columns, writers: Mapping[tuple[str, int], HopWriter]) -> Columns:
        """Return the usual ones of the messages, with the values to produce.

        Args:
            given: Delivered messages.
            writers: Writer of the hops for each partition.
        """
        places = [(writers.get(one[:2]), one[2]) for one in given.at]
        self._learn(set(places))
        place = np.array([self._places.get(one, -1) for one in places], np.int64)[given.codes]
        good = self._read(given.values, given.keys)
        good &= (place >= 0) & (given.offsets > 0) & (given.times > 0)
        own = 2 * place + (given.keys[2] < 0)
        sizes, ends = given.values[2], np.empty(len(own), np.int64)
        out = np.empty(int(sizes.sum()) + len(own) * (FRAME_BYTES + self._most_parts), np.uint8)
        numbers = (own, given.offsets, given.times)
        append_hops(given.values, sizes_of(given.keys), self._spans, *numbers, self._most_bytes, good, out, ends)
        lengths = np.diff(ends, prepend=0)
        made = given._replace(values=(out, ends - lengths, lengths))
        return made if good.all() else made.of(good)

    def _learn(self, places: set[_Place]) -> None:
        """Number places: a topic that was created again has another writer."""
        if places <= self._places.keys():
            return
        if len(self._places | dict.fromkeys(places)) > _MOST_PLACES:
            self._forget()
        for writer, leader_epoch in places - self._places.keys():
            if writer is not None:
                self._places[writer, leader_epoch] = len(self._places)
                self._parts += writer.around(leader_epoch) + writer.around(leader_epoch, keyless=True)
        self._spans = spans_of(self._parts)

    @property
    def _most_parts(self) -> int:
        """Most bytes of the parts of a hop."""
        lengths = self._spans[2]
        return int(lengths.reshape(-1, 3).sum(axis=1).max(initial=0))

    def _read(self, values: Spans, keys: Spans) -> npt.NDArray[np.bool_]:
        """Check envelopes and their chains; return which are usual."""
        good = np.empty(len(values[1]), np.bool_)
        found = np.zeros((9, len(good)), np.int64)
        own = np.zeros(len(good), np.int64)
        _, _, _, kinds, nodes = read_envelopes(values, keys, _NO_TOPIC, own, _ANY_TYPE, self._limits, good, found)
        topics = [values[0][at : at + size].tobytes().decode() for at, size in kinds[:, :2].tolist()]
        ways: list[frozenset[str] | None] = [frozenset()]
        for before, kind in nodes[1:].tolist():
            way, topic = ways[before], topics[kind]
            ways.append(None if way is None or topic in way or topic not in self._known else way | {topic})
        usual = np.array([way is not None for way in ways], np.bool_)
        good &= usual[found[8]]
        return good

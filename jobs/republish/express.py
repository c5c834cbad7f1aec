"""The fast path for the usual record: a sealed envelope without headers that is forwarded unchanged."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from aggregations.columns.envelope_reading import read_envelopes
from aggregations.columns.hop_writing import FRAME_BYTES, append_hops
from envelope import Limits
from envelope.hops import HopWriter
from envelope.limits import DEFAULT_LIMITS
from jobs.republish.partition import Consumed
from persistence.kafka.headers import have_headers

_MOST_HOPS: Final = 1024
"""Hops of a chain that compiled code reads."""
_MOST_PLACES: Final = 4096
"""Partitions, times leader epochs, whose bytes are kept."""
_NO_TOPIC: Final = (np.frombuffer(b"", np.uint8), np.zeros(1, np.int64), np.zeros(1, np.int64))
"""Of the one route without a hop. So no destination is accepted: it would have to be replaced."""
_ANY_TYPE: Final = np.frombuffer(b"", np.uint8)

_Place: TypeAlias = tuple[HopWriter | None, int | None]
_At: TypeAlias = tuple[str, int, int | None]
"""Topic, partition and leader epoch of a message."""
_Spans: TypeAlias = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]]


class Passed(NamedTuple):
    """What the fast path made of some messages.

    Attributes:
        values: Value to produce for each message; None for one that takes the normal path.
        keys: Key of each message; empty if a message takes the normal path, as are the others.
        at: Its topic, partition and leader epoch.
        offsets: Its offset.
    """

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] = ()
    at: Sequence[_At] = ()
    offsets: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def runs(self) -> dict[tuple[str, int], tuple[int, int]]:
        """First offset, and the offset after the last, of each topic and partition.

        Empty if a message takes the normal path, or the offsets of a partition have a gap.
        """
        numbers: dict[tuple[str, int], int] = {}
        groups = {one: numbers.setdefault(one[:2], len(numbers)) for one in dict.fromkeys(self.at)}
        group = np.array([groups[one] for one in self.at], np.int64)
        order = np.argsort(group, kind="stable")
        group, offsets = group[order], self.offsets[order]
        first = np.flatnonzero(np.diff(group, prepend=-1))
        steps = np.diff(offsets)
        steps[first[1:] - 1] = 1
        if not len(group) or (steps != 1).any():
            return {}
        last = np.append(first[1:], len(group)) - 1
        found = zip(offsets[first].tolist(), (offsets[last] + 1).tolist(), strict=True)
        return dict(zip(numbers, found, strict=True))


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
        self._spans = _spans(self._parts)

    def passed_on(self, messages: Sequence[Consumed], writers: Mapping[tuple[str, int], HopWriter]) -> Passed:
        """Return the values to produce.

        Args:
            messages: Delivered messages, also errors.
            writers: Writer of the hops for each partition.
        """
        values, keys = [one.value() for one in messages], [one.key() for one in messages]
        headers, usual = have_headers(messages), messages
        rows: Sequence[int] = range(len(messages))
        if any(headers) or not (all(values) and all(keys)):
            rows = [row for row, value in enumerate(values) if value and keys[row] and not headers[row]]
            usual = [messages[row] for row in rows]
            values, keys = [values[row] for row in rows], [keys[row] for row in rows]
        at = [(one.topic(), one.partition(), one.leader_epoch()) for one in usual]
        own = self._numbered(at, writers)
        offsets = np.array([one.offset() for one in usual], np.int64)
        times = np.array([time if kind else 0 for kind, time in [one.timestamp() for one in usual]], np.int64)
        texts, names = _spans(cast(list[bytes], values)), _spans(cast(list[bytes], keys))
        good = self._read(texts, names)
        good &= (own >= 0) & (offsets > 0) & (times > 0)
        ends = np.empty(len(usual), np.int64)
        out = np.empty(len(texts[0]) + len(usual) * (FRAME_BYTES + self._most_parts), np.uint8)
        append_hops(texts, names[2], self._spans, own, offsets, times, self._most_bytes, good, out, ends)
        data, cuts = out[: ends[-1] if len(ends) else 0].tobytes(), pairwise([0, *ends.tolist()])
        if 0 < len(rows) == len(messages) and good.all():
            return Passed([data[start:end] for start, end in cuts], keys, at, offsets)
        made: list[bytes | None] = [None] * len(messages)
        for row, (start, end) in zip(rows, cuts, strict=True):
            made[row] = data[start:end] or None
        return Passed(made)

    def _numbered(self, at: Sequence[_At], writers: Mapping[tuple[str, int], HopWriter]) -> npt.NDArray[np.int64]:
        """Number of each message's place; -1 for a partition that is not assigned."""
        places = {one: (writers.get(one[:2]), one[2]) for one in set(at)}
        self._learn(set(places.values()))
        numbers = {one: self._places.get(place, -1) for one, place in places.items()}
        return np.array([numbers[one] for one in at], np.int64)

    def _learn(self, places: set[_Place]) -> None:
        """Number places: a topic that was created again has another writer."""
        if places <= self._places.keys():
            return
        if len(self._places | dict.fromkeys(places)) > _MOST_PLACES:
            self._forget()
        for writer, leader_epoch in places - self._places.keys():
            if writer is not None:
                self._places[writer, leader_epoch] = len(self._places)
                self._parts += writer.around(leader_epoch)
        self._spans = _spans(self._parts)

    @property
    def _most_parts(self) -> int:
        """Most bytes of the parts of a hop."""
        lengths = self._spans[2]
        return int(lengths.reshape(-1, 3).sum(axis=1).max(initial=0))

    def _read(self, values: _Spans, keys: _Spans) -> npt.NDArray[np.bool_]:
        """Check envelopes and their chains; return which are usual."""
        good = np.empty(len(values[1]), np.bool_)
        found = np.zeros((9, len(good)), np.int64)
        own = np.zeros(len(good), np.int64)
        _, _, kinds, nodes = read_envelopes(values, keys, _NO_TOPIC, own, _ANY_TYPE, self._limits, good, found)
        topics = [values[0][at : at + size].tobytes().decode() for at, size in kinds[:, :2].tolist()]
        ways: list[frozenset[str] | None] = [frozenset()]
        for before, kind in nodes[1:].tolist():
            way, topic = ways[before], topics[kind]
            ways.append(None if way is None or topic in way or topic not in self._known else way | {topic})
        usual = np.array([way is not None for way in ways], np.bool_)
        good &= usual[found[8]]
        return good


def _spans(values: Sequence[bytes]) -> _Spans:
    """Byte strings as one buffer, starts and lengths."""
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    starts: npt.NDArray[Any] = np.cumsum(lengths) - lengths
    return np.frombuffer(b"".join(values), np.uint8), starts, lengths

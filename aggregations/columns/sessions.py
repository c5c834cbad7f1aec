"""Sessions of whole columns: which session each row joins, and the states of sessions as arrays.

Rows are put into sessions in the order in which they are folded, as `aggregations.per_message.sessions` does. Sessions
that become one are left to it: a key with such a row is unfit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.fold import Folded
from aggregations.columns.record_text import WHOLE, Values
from aggregations.columns.records import States, StoredStates, Texts
from aggregations.definition.sessions import MOST_SESSIONS, SessionWindow, near, remaining

_SESSIONS: Final = msgspec.json.Decoder(list[tuple[int, int, msgspec.Raw]])
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL: Final = b"null"
NO_DUES: Final[Mapping[int, int]] = MappingProxyType({})
"""No due times."""


@dataclass(slots=True)
class Groups:
    """Accepted rows by the state that they are folded into: those of one key, without sessions.

    Attributes:
        rows: The rows, those of one state together and in the order in which they are folded.
        codes: Number of the state of each.
        states: These states before the batch.
    """

    rows: Ints
    codes: Ints
    states: States

    def only(self, kept: Mask) -> tuple[Ints, Ints]:
        """Rows and codes, without some rows."""
        return self.rows[kept], self.codes[kept]

    @property
    def dues(self) -> Mapping[int, int]:
        """Due time of the states after the batch, by key, where the batch determines it."""
        return NO_DUES

    def of_keys(self, folded: Folded) -> Folded:
        """The states after the batch by key."""
        return folded


class SessionGroups(Groups):
    """Accepted rows by session.

    Args:
        window: The sessions of the stage.
        removed: Due time up to which sessions have left, in seconds since 1970; None if none has.
        rows: The rows, those of one key together and in the order in which they are folded.
        keys: Key of each.
        times: Event time of each, in microseconds.
        stored: States of the keys before the batch.
        fields: Names of the members of a session's state; None if it is any JSON value.
        kinds: Kind of each member's value, or of the state.
    """

    __slots__ = ("_fields", "_held", "_kinds", "_unfit", "_window")

    def __init__(
        self,
        window: SessionWindow,
        removed: int | None,
        rows: Ints,
        keys: Ints,
        times: Ints,
        stored: StoredStates,
        fields: Sequence[str] | None,
        kinds: Sequence[int],
    ) -> None:
        self._fields, self._kinds, self._window = fields, kinds, window
        self._unfit: Mask = np.zeros(len(stored.exists), np.bool_)
        self._held: dict[int, list[_Session]] = {}
        before: list[bytes | None] = []
        numbers = np.full(len(rows), -1, np.int64)
        bounds = [*np.flatnonzero(np.diff(keys, prepend=-1)).tolist(), len(keys)]
        for first, last in pairwise(bounds):
            key = int(keys[first])
            sessions = remaining(_sessions_of(stored, key), removed)
            found = list(_joined(sessions, times[first:last].tolist(), window.gap_us, before))
            if len(found) == last - first:
                numbers[first:last] = found
                self._held[key] = sessions
            else:
                self._unfit[key] = True
        order = np.argsort(numbers, kind="stable")[np.count_nonzero(numbers < 0) :]
        states = _SessionStates(before, fields, kinds)
        super().__init__(rows[order], numbers[order], states)
        for key, sessions in self._held.items():
            self._unfit[key] |= any(states.unfit[one.number] for one in sessions if one.number >= 0)

    @property
    def dues(self) -> Mapping[int, int]:
        return {key: self._window.noted_due(sessions[-1].end) for key, sessions in self._held.items()}

    def of_keys(self, folded: Folded) -> Folded:
        """The states after the batch by key: all their sessions."""
        values, unfit = Values.of(1, len(self._unfit)), self._unfit.copy()
        texts = Texts(values)
        for key, sessions in self._held.items():
            unfit[key] |= any(folded.unfit[one.number] for one in sessions if one.number >= 0)
            if not unfit[key]:
                texts.put(0, key, [[one.start, one.end, self._after(one, folded)] for one in sessions])
        return Folded(values, texts.joined(), unfit)

    def _after(self, one: "_Session", folded: Folded) -> Any:
        """The state of a session after the batch."""
        if one.number < 0:
            return msgspec.Raw(one.before)
        values, number = folded.values, one.number

        def value(member: int) -> Any:
            if self._kinds[member] == WHOLE:
                return int(values.whole[member, number]) if values.known[member, number] else None
            return msgspec.Raw(folded.texts[values.first[member, number] : values.last[member, number]])

        return value(0) if self._fields is None else {name: value(i) for i, name in enumerate(self._fields)}


@dataclass(slots=True)
class _Session:
    """One session of a key.

    Attributes:
        start: First time.
        end: Last time.
        before: Text of its state before the batch; empty if the batch began it.
        number: Number of its state if the batch folds into it; else -1.
    """

    start: int
    end: int
    before: bytes = b""
    number: int = -1

    def __getitem__(self, which: int) -> int:
        return self.end if which else self.start


class _SessionStates:
    """States of sessions before a batch, as arrays; see `aggregations.columns.records.StoredStates`."""

    def __init__(self, before: Sequence[bytes | None], fields: Sequence[str] | None, kinds: Sequence[int]) -> None:
        self.exists: Mask = np.fromiter((one is not None for one in before), np.bool_, len(before))
        self.unfit: Mask = np.zeros(len(before), np.bool_)
        self.values = Values.of(len(kinds), len(before))
        self._texts: dict[tuple[int, int], bytes] = {}
        for number, text in enumerate(before):
            if text is None:
                continue
            if fields is None:
                self._texts[0, number] = text
                continue
            members = _FIELDS.decode(text)
            for i, name in enumerate(fields):
                self._put(i, number, bytes(members[name]), whole=kinds[i] == WHOLE)

    def text(self, value: int, key: int) -> bytes:
        """The text of a value in the state of a session."""
        return self._texts[value, key]

    def _put(self, value: int, number: int, text: bytes, *, whole: bool) -> None:
        if not whole:
            self._texts[value, number] = text
        elif text != _NULL:
            self.values.known[value, number] = 1
            try:
                self.values.whole[value, number] = int(text)
            except (ValueError, OverflowError):  # a batch before had values of another type
                self.unfit[number] = True


def _sessions_of(stored: StoredStates, key: int) -> list[_Session]:
    if not stored.exists[key]:
        return []
    return [_Session(start, end, bytes(state)) for start, end, state in _SESSIONS.decode(stored.text(0, key))]


def _joined(sessions: list[_Session], times: Sequence[int], gap_us: int, before: list[bytes | None]) -> Iterator[int]:
    """The number of the session that each element joins; it ends before an element that the pure code must fold.

    Args:
        sessions: Sessions of a key; changed.
        times: Times of its elements, in the order in which they are folded.
        gap_us: The gap.
        before: Text of each numbered session's state; new ones are added.
    """
    one: _Session | None = None
    for time_us in times:
        # The usual case, without a search: within the session before, or after it and it is the last one.
        if one is not None and one.start <= time_us <= one.end + gap_us and (time_us <= one.end or one is sessions[-1]):
            one.end = max(one.end, time_us)
            yield one.number
            continue
        place = near(sessions, time_us, gap_us)
        match sessions[place]:
            case [one]:
                one.start, one.end = min(one.start, time_us), max(one.end, time_us)
            case [] if len(sessions) < MOST_SESSIONS:
                one = _Session(time_us, time_us)
                sessions.insert(place.start, one)
            case _:
                return
        if one.number < 0:
            one.number = len(before)
            before.append(one.before or None)
        yield one.number

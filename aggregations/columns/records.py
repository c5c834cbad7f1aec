"""The stored states of many keys as arrays."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from aggregations.columns.arrays import NEVER, Ints, Mask
from aggregations.columns.histories import LaneArrays
from aggregations.columns.lane_names import LaneNames
from aggregations.columns.record_reading import READ, UNKNOWN, read_records
from aggregations.columns.record_text import TEXT, Form, Values
from aggregations.columns.record_writing import write_records
from envelope.dedup.packed import divided
from persistence.errors import Corrupt
from persistence.names import StageRef
from persistence.record import SCHEMA, decode_record

_NOWHERE: Final = StageRef("f", 1, "s")


def form_of(definition: str, fields: Sequence[str] | None, kinds: Sequence[int] = (TEXT,)) -> Form:
    """The form of a stage's records.

    Args:
        definition: Definition hash of the stage.
        fields: Names of the members of a state, in order; None if the state is any JSON value.
        kinds: Kind of each member's value, or of the state.
    """
    head = b'{"schema":%d,"definition":%b,"state":' % (SCHEMA, msgspec.json.encode(definition))
    pieces = [b"", b""]
    if fields is not None:
        pieces = [b"%b%b:" % (b"," if i else b"{", msgspec.json.encode(name)) for i, name in enumerate(fields)] + [b"}"]
    return Form(
        np.frombuffer(head, np.uint8),
        np.array(kinds, np.uint8),
        np.cumsum([0, *map(len, pieces)], dtype=np.int64),
        np.frombuffer(b"".join(pieces), np.uint8),
    )


class States(Protocol):
    """States before a batch.

    Attributes:
        exists: Which of them exist.
        values: The values in them.
    """

    exists: Mask
    values: Values

    def text(self, value: int, key: int) -> bytes:
        """The text of a value in a state."""
        ...


class StoredStates:
    """The states of the keys of a batch, as they were loaded.

    Args:
        values: The stored records, by number of the key; None for a key without one.
        form: Their form.
        names: Numbers of lanes.
        timed: The records have the latest event time of their states.

    Attributes:
        exists: Whether a key has a state.
        other: Whether its record is not of the usual form: `persistence.record.decode_record` reads it.
        lanes: The histories of all keys; of a key without a state and of a record of another form, none.
        values: The values in the states, by key.
        times: Latest event time by key; `NEVER` where there is none.
        data: The records, one after the other: contains the texts of values.
    """

    def __init__(self, values: Sequence[bytes | None], form: Form, names: LaneNames, *, timed: bool = False) -> None:
        self.exists: Mask = np.fromiter((one is not None for one in values), np.bool_, len(values))
        self.other: Mask = np.zeros(len(values), np.bool_)
        whole = Values.of(len(form.kinds) + timed, len(values))
        self.values = whole.members(len(form.kinds))
        self.times: Ints = np.full(len(values), NEVER)
        self.data = b"".join(one for one in values if one is not None)
        if not self.data:
            self.lanes = LaneArrays.empty(len(values))
            return
        bounds = np.zeros(len(values) + 1, np.int64)
        np.cumsum([0 if one is None else len(one) for one in values], out=bounds[1:])
        data = np.frombuffer(self.data, np.uint8)
        found, self.lanes = read_records(data, bounds, form, names.table(), whole)
        if (found == UNKNOWN).any():
            for number in np.flatnonzero(found == UNKNOWN).tolist():
                _learn(values[number], names)
            found, self.lanes = read_records(data, bounds, form, names.table(), whole)
        self.other = (found != READ) & self.exists
        if timed:
            self.times[whole.known[-1] != 0] = whole.whole[-1, whole.known[-1] != 0]

    def text(self, value: int, key: int) -> bytes:
        """The text of a value in the state of a key."""
        return self.data[self.values.first[value, key] : self.values.last[value, key]]


class Texts:
    """Collects the texts of new values.

    Args:
        values: Receives where each text is.
        before: Texts that are there already.
    """

    def __init__(self, values: Values, before: bytes = b"") -> None:
        self._values = values
        self._texts = [before]
        self._end = len(before)

    def put(self, value: int, key: int, what: Any) -> None:
        """Add a value in the state of a key."""
        text = msgspec.json.encode(what)
        self._texts.append(text)
        self._values.first[value, key], self._values.last[value, key] = self._end, self._end + len(text)
        self._end += len(text)

    def joined(self) -> bytes:
        """All texts, one after the other."""
        return b"".join(self._texts)


def _learn(value: bytes | None, names: LaneNames) -> None:
    """Number the lanes of a record."""
    assert value is not None
    with suppress(Corrupt):  # it is read again, and refused, when it is folded
        unpacked, _ = divided(decode_record(value, _NOWHERE, b"").histories.lanes)
        for name in unpacked:
            names.number(name)


def encoded(form: Form, names: LaneNames, lanes: LaneArrays, states: Ints, values: Values, texts: bytes) -> list[bytes]:
    """The records of states.

    Args:
        form: Their form.
        names: Numbers of lanes.
        lanes: Histories.
        states: The states to write: numbers of histories and columns of `values`.
        values: Values in the states; texts as places in `texts`.
        texts: Texts of the values that have one.
    """
    data, bounds = write_records(form, names.table(), lanes, states, values, np.frombuffer(texts, np.uint8))
    whole, ends = data.tobytes(), bounds.tolist()
    return [whole[first:last] for first, last in pairwise(ends)]

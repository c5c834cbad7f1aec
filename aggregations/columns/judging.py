"""Filters over the rows of a batch: their rulings, and the states of their scopes after it.

`SequenceFilter` over a column of integers is computed by columns. Other filters judge row by row, in a loop over the rows
of each state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.judge import VERDICTS
from aggregations.columns.record_text import Values
from aggregations.columns.records import StoredStates, Texts
from aggregations.definition.judging import Judging
from aggregations.per_message.cause import Cause
from aggregations.per_message.judging import ruled
from envelope import EnvelopeError, Verdict
from envelope.filters.arrival import Filter, FromEnvelope, FromValue, Scope
from envelope.filters.sequence import (
    KEYED,
    Decreasing,
    SequenceFilter,
    Unusable,
    decreased,
    keyed_after,
    keyed_warning,
    sequence_number,
)

_CODES: Final = {verdict: number for number, verdict in enumerate(VERDICTS)}
_INTEGERS: Final = frozenset(
    {pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64(), pl.UInt8(), pl.UInt16(), pl.UInt32(), pl.UInt64()}
)
_LOWEST: Final = -(1 << 63)
_NUMBER, _SEEN, _CODE, _KEY = "number", "seen", "code", "key"


def stamped(name: str) -> str:
    """Name of an envelope's field among the columns that a filter reads; not valid as the name of a payload's column."""
    return f"_{name}"


@dataclass(slots=True)
class Rulings:
    """Rulings on rows, and the states after them.

    Attributes:
        verdicts: Index in `VERDICTS` of each row's verdict.
        forward: Whether each row is passed on.
        values: Where the text of each state is, by number of the key; only of keys with a row.
        texts: The texts.
        rejected: The rejected rows, with the cause.
        warnings: Signs that the filter is used wrongly.
    """

    verdicts: npt.NDArray[np.uint8]
    forward: Mask
    values: Values
    texts: bytes = b""
    rejected: dict[int, Cause] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def rulings_of(
    rule: Filter[Any],
    inputs: pl.DataFrame,
    subjects: Callable[[], Sequence[Any]],
    keys: pl.Series,
    codes: Ints,
    stored: StoredStates,
) -> Rulings:
    """Judge rows.

    Args:
        rule: The filter.
        inputs: The columns that it reads, by name; empty if they are not known.
        subjects: Returns the rows as the filter judges them.
        keys: The records' keys.
        codes: Number of each row's state; the rows of one state together, in the order in which they are judged.
        stored: The states before.
    """
    if not len(codes):
        return Rulings(np.empty(0, np.uint8), np.empty(0, np.bool_), Values.of(1, len(stored.exists)))
    if type(rule) is SequenceFilter and isinstance(rule.sequence, FromValue | FromEnvelope):
        name = rule.sequence.name if isinstance(rule.sequence, FromValue) else stamped(rule.sequence.name)
        numbers = inputs.get_column(name) if name in inputs.columns else pl.Series(dtype=pl.Null)
        if numbers.dtype in _INTEGERS and numbers.min() != _LOWEST:
            return _sequences(rule, numbers, keys, codes, stored)
    return _one_by_one(rule, subjects(), codes, stored)


def _state(rule: Filter[Any], code: int, stored: StoredStates) -> Any:
    return rule.load(msgspec.json.decode(stored.text(0, code))) if stored.exists[code] else rule.zero()


def _one_by_one(rule: Filter[Any], subjects: Sequence[Any], codes: Ints, stored: StoredStates) -> Rulings:
    values = Values.of(1, len(stored.exists))
    found = Rulings(np.empty(len(codes), np.uint8), np.empty(len(codes), np.bool_), values)
    texts, rulings = Texts(values), []
    current, state, scoped = -1, None, not Judging(rule).by_key
    for row, code in enumerate(codes.tolist()):
        if code != current:
            if current >= 0:
                texts.put(0, current, rule.dump(state))
            current, state = code, _state(rule, code, stored)
        ruling, state = ruled(rule, state, subjects[row], scoped=scoped)
        rulings.append(ruling)
        if ruling.verdict is Verdict.REJECTED:
            assert ruling.reason is not None
            found.rejected[row] = Cause(ruling.reason, ruling.detail)
        if ruling.warning:
            found.warnings.append(ruling.warning)
    if current >= 0:
        texts.put(0, current, rule.dump(state))
    found.verdicts[:] = [_CODES[one.verdict] for one in rulings]
    found.forward[:] = [one.forward for one in rulings]
    found.texts = texts.joined()
    return found


def _sequences(rule: SequenceFilter, numbers: pl.Series, keys: pl.Series, codes: Ints, stored: StoredStates) -> Rulings:
    """`SequenceFilter.judge` over a column of integers: a running maximum for each state."""
    usable = numbers.is_not_null()
    if numbers.dtype == pl.UInt64:
        usable &= (numbers <= (1 << 63) - 1).fill_null(value=False)
    scoped = np.ones(len(codes), np.bool_) if rule.scope_by is Scope.PARTITION else keys.is_not_null().to_numpy()
    usable &= pl.Series(scoped)
    own = np.unique(codes)
    before = {int(code): _state(rule, int(code), stored) for code in own}
    seen = np.full(len(stored.exists), _LOWEST, np.int64)
    for code, state in before.items():
        if state.seen is not None:
            seen[code] = state.seen
    number = numbers.to_frame(_NUMBER).select(
        pl.when(usable).then(pl.col(_NUMBER).cast(pl.Int64, strict=False)).otherwise(_LOWEST).alias(_NUMBER)
    )[_NUMBER]
    frame = pl.DataFrame({_CODE: codes, _NUMBER: number, _SEEN: seen[codes]})
    highest = frame.select(pl.max_horizontal(pl.col(_NUMBER).cum_max().over(_CODE), _SEEN)).to_series().to_numpy()
    last = np.empty_like(highest)  # the highest number before each row
    last[1:] = highest[:-1]
    first = np.flatnonzero(np.diff(codes, prepend=-1))
    last[first] = seen[codes[first]]
    value, has_number = number.to_numpy(), usable.to_numpy()
    new = has_number & (value > last)
    equal = has_number & (value == last)
    lower = has_number & (value < last)
    verdicts = np.full(len(codes), _CODES[Verdict.ACCEPTED], np.uint8)
    verdicts[equal] = _CODES[Verdict.DUPLICATE]
    verdicts[lower] = _CODES[Verdict.BELOW_FLOOR]
    values = Values.of(1, len(stored.exists))
    found = Rulings(verdicts, new, values)
    unidentified = ~scoped
    if rule.unusable is Unusable.FORWARD:
        unidentified = ~has_number
    else:
        for row in np.flatnonzero(scoped & ~has_number).tolist():
            found.rejected[row] = _unusable(numbers[row])
    verdicts[unidentified] = _CODES[Verdict.UNIDENTIFIED]
    found.forward = new | unidentified
    if rule.decreasing is Decreasing.REJECT:
        for row in np.flatnonzero(lower).tolist():
            ruling = decreased(int(value[row]), int(last[row]))
            assert ruling.reason is not None
            found.rejected[row] = Cause(ruling.reason, ruling.detail)
    verdicts[list(found.rejected)] = _CODES[Verdict.REJECTED]
    _put_states(rule, found, frame, highest, new, keys, before)
    return found


def _unusable(number: Any) -> Cause:
    try:
        sequence_number(number)
    except EnvelopeError as error:
        return Cause.of(error)
    raise AssertionError("a sequence number that can be used")


def _put_states(
    rule: SequenceFilter,
    found: Rulings,
    frame: pl.DataFrame,
    highest: Ints,
    new: Mask,
    keys: pl.Series,
    before: dict[int, Any],
) -> None:
    """The states after the batch, and whether keys contain the numbers of their records."""
    codes = frame.get_column(_CODE).to_numpy()
    last_rows = np.append(np.flatnonzero(np.diff(codes)), len(codes) - 1)
    text = pl.col(_NUMBER).cast(pl.String).str.strip_prefix("-").cast(pl.Binary)
    named = frame.with_columns(keys.alias(_KEY)).select(pl.col(_KEY).bin.contains(text).fill_null(value=False))
    suspicious = set(codes[new & named.to_series().to_numpy()].tolist())
    begins = np.concatenate(([0], last_rows[:-1] + 1))
    accepts = np.add.reduceat(new.astype(np.int64), begins)
    texts = Texts(found.values)
    for begin, row, accepted in zip(begins.tolist(), last_rows.tolist(), accepts.tolist(), strict=True):
        code = int(codes[row])
        state = before[code]
        keyed = state.keyed
        if accepted and keyed < KEYED:
            keyed = 0
            if code in suspicious:
                keyed = _keyed(state.keyed, frame, new, keys, range(begin, row + 1))
                if keyed == KEYED:
                    found.warnings.append(keyed_warning(rule.name))
        seen = int(highest[row]) if accepted else state.seen
        texts.put(0, code, rule.dump(type(state)(seen, keyed)))
    found.texts = texts.joined()


def _keyed(keyed: int, frame: pl.DataFrame, new: Mask, keys: pl.Series, rows: range) -> int:
    """Records in a row whose key contains their number, after the rows of one state."""
    numbers = frame.get_column(_NUMBER)
    for row in rows:
        if new[row]:
            keyed = keyed_after(keyed, keys[row], numbers[row])
    return keyed

"""States that expire, in whole columns: `aggregations.per_message.closed` is the reference."""

from collections.abc import Mapping

import numpy as np
import polars as pl

from aggregations.columns import schema
from aggregations.columns.arrays import NEVER, Ints, Mask
from aggregations.columns.fold import Folded
from aggregations.columns.record_text import Values
from aggregations.columns.records import StoredStates
from aggregations.definition.expiry import Expiry
from aggregations.definition.times import MICROS


class Expiring:
    """The event times of a batch of a stage whose states expire.

    Args:
        expiry: When states expire.
        frame: The rows, with `_time` and `_before`.
        codes: Number of each row's key.
        stored: The states before, with their times.
    """

    def __init__(self, expiry: Expiry, frame: pl.DataFrame, codes: Ints, stored: StoredStates) -> None:
        self._expiry, self._codes, self._stored = expiry, codes, stored
        self._times: Ints = frame.get_column(schema.TIME).to_numpy()
        self._reached = np.maximum(frame.get_column(schema.BEFORE).fill_null(NEVER).to_numpy(), self._times)

    def may_expire(self) -> Mask:
        """Rows of a key whose state may expire within the batch, so that a row begins a new one."""
        latest = np.full(len(self._stored.times), NEVER)
        np.maximum.at(latest, self._codes, self._reached)
        first = np.full(len(latest), np.iinfo(np.int64).max)
        np.minimum.at(first, self._codes, self._times)
        known = np.where(self._stored.times == NEVER, first, self._stored.times)
        found: Mask = known <= latest - self._expiry.seconds * MICROS
        return found[self._codes]

    def in_order(self, rows: Ints) -> Ints:
        """Rows of one key after the other, those of a key in the order of their partition's log."""
        return rows[np.lexsort((self._reached[rows], self._codes[rows]))]

    def disordered(self, rows: Ints) -> Mask:
        """Rows of a key that are folded in another order than that of their positions, which `rows` are in."""
        elsewhere = rows != self.in_order(rows)
        return np.isin(self._codes, self._codes[rows[elsewhere]])

    def after(self, folded: Folded, rows: Ints) -> tuple[Folded, Mapping[int, int]]:
        """The states with their latest event times, and the due times of those that changed, by key.

        Args:
            folded: The states after the batch.
            rows: The rows that were folded.
        """
        times, keys = self._stored.times.copy(), np.unique(self._codes[rows])
        np.maximum.at(times, self._codes[rows], self._times[rows])
        dues = {
            key: self._expiry.noted_due(time) for key, time in zip(keys.tolist(), times[keys].tolist(), strict=True)
        }
        return folded._replace(values=with_times(folded.values, times)), dues


def with_times(values: Values, times: Ints) -> Values:
    """Values in states, and the latest event time of each."""
    return Values(
        np.vstack([values.whole, times]),
        np.vstack([values.known, np.ones(len(times), np.uint8)]),
        np.vstack([values.first, np.zeros_like(times)]),
        np.vstack([values.last, np.zeros_like(times)]),
    )

"""What a filter decides about the rows of a batch, and the states after it."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.judge import VERDICTS
from aggregations.columns.record_text import Values
from aggregations.columns.records import StoredStates
from aggregations.per_message.cause import Cause
from envelope import Reason, Verdict

ACCEPTED: Final = VERDICTS.index(Verdict.ACCEPTED)
BELOW_FLOOR: Final = VERDICTS.index(Verdict.BELOW_FLOOR)
BEYOND_HORIZON: Final = VERDICTS.index(Verdict.BEYOND_HORIZON)
DUPLICATE: Final = VERDICTS.index(Verdict.DUPLICATE)
FENCED: Final = VERDICTS.index(Verdict.FENCED)
LATE: Final = VERDICTS.index(Verdict.LATE)
REJECTED: Final = VERDICTS.index(Verdict.REJECTED)
UNIDENTIFIED: Final = VERDICTS.index(Verdict.UNIDENTIFIED)


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
        left: States that were not judged: their rows are left to the pure code.
    """

    verdicts: npt.NDArray[np.uint8]
    forward: Mask
    values: Values
    left: Mask
    texts: bytes = b""
    rejected: dict[int, Cause] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, rows: int, stored: StoredStates) -> "Rulings":
        """No rulings yet."""
        states = len(stored.exists)
        return cls(
            np.full(rows, ACCEPTED, np.uint8),
            np.zeros(rows, np.bool_),
            Values.of(1, states),
            np.zeros(states, np.bool_),
        )

    def reject(self, row: int, reason: Reason | None, detail: str) -> None:
        """Reject a row."""
        assert reason is not None
        self.verdicts[row], self.forward[row] = REJECTED, False
        self.rejected[row] = Cause(reason, detail)


def begins_of(codes: Ints) -> Ints:
    """Where the rows of each state begin, given the state of each row."""
    return np.flatnonzero(np.diff(codes, prepend=-1))

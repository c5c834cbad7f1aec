"""The numbers that a filter by number skips while records are missing: they decide about those that come back.

A number that is not above the highest one is a copy's, if numbers arrive in their order. A dead letter comes back out of
order: its number may have been skipped, or another record may have brought it. From the rejection on, a state therefore
notes the ranges that it skips. A number in a noted range was not passed on. Every other one up to the highest was passed
on, or was not above the highest number when its record was rejected, and would have been dropped.
"""

from dataclasses import dataclass
from typing import Any, Final, Self

from envelope.dedup.verdict import Verdict
from envelope.errors import Reason
from envelope.filters.arrival import DUPLICATE, INT64, REDRIVEN, UNPROVEN, Ruling

RANGES: Final = 128
"""Ranges that are noted for a state, or for a producer. With more, nothing is known of the lowest any more."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Ranges of numbers that were not passed on.

    Attributes:
        ranges: First and last number of each, ascending.
        floor: Highest number of which nothing is known; None if there is none.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    floor: int | None = None

    def before(self, number: int, highest: int | None) -> "Skipped":
        """With the numbers between the highest one so far, None before the first, and the next one."""
        low = -INT64 if highest is None else highest + 1
        if low >= number:
            return self
        ranges = (*self.ranges, (low, number - 1))
        return Skipped(ranges, self.floor) if len(ranges) <= RANGES else Skipped(ranges[1:], ranges[0][1])

    def judge(self, first: int, last: int) -> tuple[Ruling, "Skipped"]:
        """Decide about a record with numbers that are not above the highest one: passed on, they are not skipped."""
        for low, high in self.ranges:
            if low <= first and last <= high:
                rest = ((low, first - 1), (last + 1, high))
                left = [one for one in self.ranges if one != (low, high)] + [one for one in rest if one[0] <= one[1]]
                return REDRIVEN, Skipped(tuple(sorted(left)), self.floor)
            if low <= last and first <= high:
                detail = f"numbers {first} to {last} were passed on in part"
                return Ruling(Verdict.REJECTED, forward=False, reason=Reason.OUT_OF_SEQUENCE, detail=detail), self
        return (UNPROVEN if self.floor is not None and first <= self.floor else DUPLICATE), self

    def dump(self) -> Any:
        """A readable JSON value."""
        return {"ranges": [list(one) for one in self.ranges], **({} if self.floor is None else {"floor": self.floor})}

    @classmethod
    def load(cls, value: Any) -> Self | None:
        """What `dump` returned this value for; None for None."""
        if value is None:
            return None
        return cls(tuple((low, high) for low, high in value["ranges"]), value.get("floor"))

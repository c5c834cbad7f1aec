"""The sequence filter: a record is new if its sequence number is greater than the last one of its partition or key.

The algorithm is the one by which TCP drops repeated segments. It needs one number for each partition.
"""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from envelope.dedup.verdict import Verdict
from envelope.errors import EnvelopeError, Reason
from envelope.filters.arrival import (
    ACCEPTED,
    DUPLICATE,
    INT64,
    UNIDENTIFIED,
    UNPROVEN,
    Extractor,
    Ruling,
    Scope,
    extracted,
    rejected,
    scope_of,
)
from envelope.filters.skipped import Skipped

KEYED: Final = 8
"""Records in a row whose key contains their own sequence number, after which the filter warns."""

_NUMBER = re.compile(r"[+-]?[0-9]{1,19}\Z", re.ASCII)
_DIGITS = re.compile(rb"[0-9]+")
_BELOW = Ruling(Verdict.BELOW_FLOOR, forward=False)


class Unusable(StrEnum):
    """What happens to a record without a usable sequence number."""

    REJECT = "reject"
    """It is rejected, with reason `missing_field` or `bad_sequence`, and belongs into the dead-letter topic."""
    FORWARD = "forward"
    """It is passed on as `unidentified`: its copies are not recognised."""


class Decreasing(StrEnum):
    """What happens to a record whose sequence number is lower than the last one."""

    DROP = "drop"
    """It counts as a duplicate."""
    REJECT = "reject"
    """It is rejected, with reason `out_of_sequence`: for producers that never send a record again out of order."""


@dataclass(frozen=True, slots=True)
class LastSeen:
    """What the filter remembers of a partition or key.

    Attributes:
        seen: Highest sequence number seen; None before the first.
        keyed: Records in a row whose key contained their own sequence number, up to `KEYED`.
        skipped: Numbers that it has skipped since records are missing; None if none are.
    """

    seen: int | None = None
    keyed: int = 0
    skipped: Skipped | None = None


@dataclass(frozen=True, slots=True)
class SequenceFilter:
    """Passes on a record if its sequence number is greater than every number seen before in its scope.

    Gaps do no harm. Within a scope, sequence numbers must be unique and strictly increasing in the order in which
    records are first sent, and the producer must send again in that order.

    Attributes:
        sequence: Extracts the sequence number: an integer of 64 bits, or its decimal digits as text or bytes.
        scope_by: Scope of the numbers. With `Scope.PARTITION` there is one number for each partition; with `Scope.KEY`
            one for each key.
        unusable: What happens to a record whose sequence number is missing or is not a number.
        decreasing: What happens to a record whose sequence number is lower than the last one.
        name: Name of the states in a store.
    """

    sequence: Extractor
    scope_by: Scope = Scope.PARTITION
    unusable: Unusable = Unusable.REJECT
    decreasing: Decreasing = Decreasing.DROP
    name: str = "sequence"

    def scope(self, arrival: Any) -> bytes | None:
        return scope_of(self.scope_by, arrival)

    def zero(self) -> LastSeen:
        return LastSeen()

    def judge(self, state: LastSeen, arrival: Any) -> tuple[Ruling, LastSeen]:
        try:
            number = sequence_number(extracted(self.sequence, arrival, "sequence number"))
        except EnvelopeError as error:
            return (UNIDENTIFIED if self.unusable is Unusable.FORWARD else rejected(error)), state
        if state.seen is None or number > state.seen:
            keyed = keyed_after(state.keyed, arrival.key, number)
            skipped = None if state.skipped is None else state.skipped.before(number, state.seen)
            after = LastSeen(number, keyed, skipped)
            if keyed == KEYED > state.keyed:
                return Ruling(Verdict.ACCEPTED, forward=True, warning=keyed_warning(self.name)), after
            return ACCEPTED, after
        if number == state.seen:
            return DUPLICATE, state
        if self.decreasing is Decreasing.REJECT:
            return decreased(number, state.seen), state
        return _BELOW, state

    def judge_late(self, state: LastSeen, arrival: Any) -> tuple[Ruling, LastSeen]:
        """Decide about a record that was missing; see `envelope.filters.arrival.judge_late`."""
        try:
            number = sequence_number(extracted(self.sequence, arrival, "sequence number"))
        except EnvelopeError:
            return self.judge(state, arrival)
        if state.seen is None or number > state.seen:
            return self.judge(state, arrival)
        if state.skipped is None:
            return (DUPLICATE if number == state.seen else UNPROVEN), state
        ruling, skipped = state.skipped.judge(number, number)
        return ruling, replace(state, skipped=skipped)

    def track(self, state: LastSeen, *, on: bool) -> LastSeen:
        """Note what is skipped from now on, or no longer; see `envelope.filters.arrival.tracking`."""
        if on is (state.skipped is not None):
            return state
        return replace(state, skipped=Skipped() if on else None)

    def rest(self, state: LastSeen) -> LastSeen:
        """See `envelope.filters.arrival.resting`."""
        return replace(state, skipped=None) if state.skipped == Skipped() else state

    def dump(self, state: LastSeen) -> Any:
        keyed = {"keyed": state.keyed} if state.keyed else {}
        skipped = {} if state.skipped is None else {"skipped": state.skipped.dump()}
        return {"seen": state.seen, **keyed, **skipped}

    def load(self, value: Any) -> LastSeen:
        return LastSeen(value["seen"], value.get("keyed", 0), Skipped.load(value.get("skipped")))


def decreased(number: int, seen: int) -> Ruling:
    """The ruling for a number that is lower than the last one, if such records are rejected."""
    detail = f"sequence number {number} follows {seen}"
    return Ruling(Verdict.REJECTED, forward=False, reason=Reason.OUT_OF_SEQUENCE, detail=detail)


def sequence_number(found: Any) -> int:
    """Read a sequence number as Java's `Long.parseLong` does, from an integer, text or bytes.

    Raises:
        EnvelopeError: `MISSING_FIELD`: there is none. `BAD_SEQUENCE`: it is not an integer of 64 bits.
    """
    if found is None:
        raise EnvelopeError(Reason.MISSING_FIELD, "the record has no sequence number")
    number = None
    if type(found) is int:
        number = found
    elif isinstance(found, str | bytes):
        text = found.decode("latin-1") if isinstance(found, bytes) else found
        number = int(text) if _NUMBER.match(text) else None
    if number is None or not -INT64 <= number < INT64:
        raise EnvelopeError(
            Reason.BAD_SEQUENCE, f"the sequence number, of type {type(found).__name__}, is not an integer of 64 bits"
        )
    return number


def keyed_after(before: int, key: bytes | None, number: int) -> int:
    """Records in a row whose key contains their sequence number, this one included."""
    if before == KEYED:
        return before
    digits = b"%d" % abs(number)
    return before + 1 if key is not None and digits in _DIGITS.findall(key) else 0


def keyed_warning(name: str) -> str:
    """What the filter warns of if keys contain the numbers of their records."""
    return (
        f"filter {name}: the keys of the last {KEYED} records contain their sequence numbers. Records with different keys "
        "go to different partitions, and their order is lost. Use the id of what the records belong to as key, and put "
        "the sequence number into the value or a header"
    )

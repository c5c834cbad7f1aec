"""What a stage or a filter decides about one message, and why."""

from enum import StrEnum


class Verdict(StrEnum):
    """Closed set of verdicts. Each has a counter per stage and filter."""

    ACCEPTED = "accepted"
    """New, and above everything folded in its lane."""
    LATE = "late"
    """New, but below the lane's highest position."""
    REDRIVEN = "redriven"
    """New: it was missing because of a dead letter, here or upstream."""
    NEW_LANE = "new_lane"
    """New, and the first of its lane in a state that has other lanes.

    Normal where a key arrives over several partitions (`co_partitioned=False`, later stages, keys that a republisher
    changes): one for each partition. Elsewhere, and later in a run, it means that the topology changed.
    """
    NEW_INCARNATION = "new_incarnation"
    """New, from a root topic id that this flow has not seen: the topic was created again."""
    STALE_INCARNATION = "stale_incarnation"
    """New, from a root topic id that was seen before the current one."""
    AMBIGUOUS = "ambiguous"
    """A sibling without fan-out index and without event id; the source's policy decided."""
    DUPLICATE = "duplicate"
    """The state holds its position: it was folded before."""
    DUPLICATE_IN_BATCH = "duplicate_in_batch"
    """Its position was folded earlier in the same batch."""
    BELOW_FLOOR = "below_floor"
    """At or below the floor, and not in a hole: treated as a duplicate, but not proven to be one. Dropped."""
    COPY = "copy"
    """Redriven, but this flow did not reject its record, or has folded it since. Dropped."""
    UNPROVEN = "unproven"
    """As `below_floor`, but it arrived by a retry or redrive route: never dropped, sent to the dead-letter topic."""
    REJECTED = "rejected"
    """Cannot be used; a reason code says why. Sent to the dead-letter topic."""
    UNIDENTIFIED = "unidentified"
    """Of a filter: it has no key, id or sequence number to be judged by. Passed on."""
    REPROCESSED = "reprocessed"
    """Of a filter: the record at this offset was passed on before, and is read again after a crash. Passed on."""
    BEYOND_HORIZON = "beyond_horizon"
    """Of a filter: older than what the filter remembers, so nothing shows whether it is a duplicate."""
    GAP = "gap"
    """Of a filter: new, and sequence numbers of its producer are missing before it."""
    HELD = "held"
    """Of a filter: held back until the sequence numbers before it arrive."""
    IN_FLIGHT = "in_flight"
    """Of a sequence map: sent before and not acknowledged yet. Sent again later, it is judged by what was stored."""
    FENCED = "fenced"
    """Of a filter: from an older session of its producer. Dropped."""
    WINDOW_CLOSED = "window_closed"
    """Its window is closed. Dropped, or sent to the dead-letter topic, as the stage's `window=` says. It may be a copy."""

    @property
    def diverts(self) -> bool:
        """Whether the message goes to the dead-letter topic. Otherwise it is folded or dropped, as `Decision.fold` says."""
        return self in (Verdict.UNPROVEN, Verdict.REJECTED)

"""What a stage decides about one message, and why."""

from enum import StrEnum


class Verdict(StrEnum):
    """Closed set of verdicts. Every one has a counter per stage."""

    ACCEPTED = "accepted"
    """New, and above everything folded in its lane."""
    LATE = "late"
    """New, but below the lane's highest position."""
    REDRIVEN = "redriven"
    """New: it was missing because of a dead letter, here or upstream."""
    NEW_LANE = "new_lane"
    """New, and the first of its lane in a state that has other lanes.

    Usual where a key comes over several partitions (`co_partitioned=False`, later stages, keys that a republisher
    changes): one for each of them. Elsewhere, and later on, it says that the topology changed.
    """
    NEW_INCARNATION = "new_incarnation"
    """New, from a root topic id that this flow has not seen: the topic was created again."""
    STALE_INCARNATION = "stale_incarnation"
    """New, from a root topic id that was seen before the current one."""
    AMBIGUOUS = "ambiguous"
    """A sibling without fan-out index and without id; the source's policy decided."""
    DUPLICATE = "duplicate"
    """Its position is held by the state: folded before."""
    DUPLICATE_IN_BATCH = "duplicate_in_batch"
    """Its position was folded earlier in the same batch."""
    BELOW_FLOOR = "below_floor"
    """At or below the floor and no hole: taken for a duplicate, but not proven one."""
    COPY = "copy"
    """Redriven, and this flow did not give its record up, or has folded it since. Dropped."""
    UNPROVEN = "unproven"
    """The same, but it came by a retry or redrive route: never dropped, sent to the dead-letter topic."""
    REJECTED = "rejected"
    """Cannot be used; a reason code says why. Sent to the dead-letter topic."""

    @property
    def diverts(self) -> bool:
        """Whether the message goes to the dead-letter topic. Folded or dropped otherwise: the decision says."""
        return self in (Verdict.UNPROVEN, Verdict.REJECTED)

"""How much room a state has left for new lanes and siblings while a batch is folded into it."""

from envelope.dedup.histories import Histories
from envelope.dedup.history import is_loose
from envelope.dedup.lineage import Position, Standing
from envelope.errors import Reason

SIBLINGS = 1024
"""Messages of one root without a fan-out index that a state tells apart."""
KNOWN_LANES = 1 << 14
"""Lanes per state, retired ones included. None is forgotten, because an intermediate topic or a dead letter may deliver
again at any time. Kafka topics rarely have more than a hundred partitions; a hundred times a hundred fit."""


class Room:
    """Checks the limits of a state while a batch is folded into it.

    Args:
        histories: The histories before the batch.
    """

    def __init__(self, histories: Histories) -> None:
        self._histories = histories
        self._opened: set[str] = set()
        self._siblings: dict[tuple[str, int | str], set[Position]] = {}

    def take(self, standing: Standing) -> tuple[Reason, str] | None:
        """Count a message that is to be folded; return the reason code and the rule if it exceeds a limit."""
        if standing.lane not in self._histories.lanes and standing.lane not in self._opened:
            if len(self._histories.lanes) + len(self._opened) >= KNOWN_LANES:
                return Reason.TOO_MANY_LANES, f"its key arrives on more than {KNOWN_LANES} lanes"
            self._opened.add(standing.lane)
        if not is_loose(standing.position):
            return None
        siblings = self._siblings_of(standing)
        if standing.position not in siblings and len(siblings) >= SIBLINGS:
            return Reason.TOO_MANY_SIBLINGS, f"its root has more than {SIBLINGS} messages without a fan-out index"
        siblings.add(standing.position)
        return None

    def _siblings_of(self, standing: Standing) -> set[Position]:
        root = (standing.group, standing.position[0])
        if root not in self._siblings:
            group = self._histories.group(standing.group)
            self._siblings[root] = set() if group is None else group.of_root(standing.position[0])
        return self._siblings[root]

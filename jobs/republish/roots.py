"""Checks that a root can exist: if one beyond its topic's end were folded, later messages of its key would be lost."""

from typing import cast

from envelope import Node
from persistence.kafka import BrokerRefused, Topics


class RootEnds:
    """The ends of root topics, fetched again whenever a root lies beyond the known ends.

    A record is read after its root was written, so the ends fetched now are higher than every real root. A root is
    accepted unchecked if its topic cannot be queried: it is in another cluster, of an earlier incarnation, deleted, or
    this user may not see it.

    Args:
        topics: Access to topics.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._ids: dict[str, str] = {}
        self._ends: dict[tuple[str, int], int] = {}

    def is_beyond(self, root: Node) -> bool:
        """Whether a root cannot exist.

        Raises:
            BrokerUnavailable: No broker answers.
        """
        if root.cluster or root.offset < self._ends.get((root.topic, root.partition), 0):
            return False
        try:
            self._ids |= self._topics.topic_ids([root.topic])
            # Looked up for every root: a plain tuple is made in a tenth of the time.
            self._ends |= cast("dict[tuple[str, int], int]", self._topics.ends([root.topic]))
        except BrokerRefused:
            return False
        if root.topic_id and root.topic_id != self._ids[root.topic]:
            return False
        return root.offset >= self._ends.get((root.topic, root.partition), 0)

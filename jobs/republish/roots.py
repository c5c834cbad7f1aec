"""Whether a root can exist: an offset beyond the end of its topic would silence a key for ever where it is folded."""

from envelope import Node
from persistence.kafka import BrokerRefused, Topics


class RootEnds:
    """The ends of root topics, asked for again whenever a root lies beyond what is known.

    A record is read after its root was written, so the ends asked for now are behind every real root. A root topic
    that cannot be asked (of another cluster or an earlier life, deleted, not this user's to see) is believed.

    Args:
        topics: Whom to ask.
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
            self._ends |= self._topics.ends([root.topic])
        except BrokerRefused:
            return False
        if root.topic_id and root.topic_id != self._ids[root.topic]:
            return False
        return root.offset >= self._ends.get((root.topic, root.partition), 0)

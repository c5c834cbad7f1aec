"""Topic ids that a flow has seen, in the order in which they were first seen."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from envelope import Verdict
from envelope.limits import broker_id

NO_ID: Final = "none"
"""Id of a topic that was first folded without access to its broker. It stays that, or positions of one record would be in
two lanes: the ids that brokers give have 22 characters."""


@dataclass(slots=True)
class Incarnations:
    """Topic ids in the order in which this flow first saw them, as reported by the broker.

    Only ids that the broker confirms are kept: messages may name any topic and id, and invalid ones must not
    fill the manifest. If the broker does not know a topic, only lanes distinguish its ids.

    Attributes:
        known: Ids by topic in the manifest.
        current: Current id by topic, if the broker reports it.
        seen: Current ids by topic that messages named and `known` does not contain.
    """

    known: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    current: Mapping[str, str] = field(default_factory=dict)
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def verdict(self, topic: str, topic_id: str) -> Verdict | None:
        """Verdict for a root with this topic id; None for the current id, unless it is new and the topic had others."""
        current = self.current.get(topic)
        if not topic_id or not current or (current == NO_ID and topic_id != NO_ID):
            return None
        if broker_id(topic_id) != current:
            return Verdict.STALE_INCARNATION
        ids = self.known.get(topic, ())
        if current in ids:
            return None
        self.seen[topic] = (current,)
        return Verdict.NEW_INCARNATION if ids else None

    def merged(self) -> dict[str, tuple[str, ...]]:
        """All ids, the newly seen ones last."""
        return merge_incarnations(self.known, self.seen)


def merge_incarnations(
    known: Mapping[str, tuple[str, ...]], *more: Mapping[str, Iterable[str]]
) -> dict[str, tuple[str, ...]]:
    """Ids by topic, `known` first, then what the others add, in their order."""
    merged = {topic: tuple(ids) for topic, ids in known.items()}
    for ids_by_topic in more:
        for topic, ids in ids_by_topic.items():
            have = merged.get(topic, ())
            merged[topic] = (*have, *(one for one in ids if one not in have))
    return merged

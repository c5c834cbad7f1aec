"""Topic ids: which ones a flow has met, in order of first sight."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from envelope import Verdict


@dataclass(slots=True)
class Incarnations:
    """Topic ids in the order in which this flow first saw them, as the broker said them.

    Only the broker's word is kept: messages may name any topic and id, and what they name in vain must not
    fill the manifest. Where the broker says nothing of a topic, its ids are told apart by their lanes alone.

    Attributes:
        known: Ids by topic as the manifest has them.
        current: Current id by topic, as far as the broker says it.
        seen: Current ids that messages named and `known` has not, by topic.
    """

    known: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    current: Mapping[str, str] = field(default_factory=dict)
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def verdict(self, topic: str, topic_id: str) -> Verdict | None:
        """What a root of this topic id is; None for the current one unless it is new to a topic that had others."""
        current = self.current.get(topic)
        if not topic_id or not current:
            return None
        if topic_id != current:
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

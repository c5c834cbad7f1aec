"""Checks of a batch with the broker: whether a root can exist, and whether the source is still the same topic.

A root beyond the end of its topic would raise a lane's floor permanently. The ends are fetched after the batch was
delivered, so every real root is below them. If a root topic cannot be queried (it is in another cluster, deleted, or
this user may not see it), its roots are accepted. A root without a topic id belongs to the current topic.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.clients import topics_of
from aggregations.run.incarnations import NO_ID
from aggregations.run.plan import cut, recreated
from aggregations.run.risks import refuse
from envelope import Node, TopicPartition
from envelope.limits import OFFSET_BITS, OFFSET_MASK, root_number
from persistence.kafka import BrokerRefused, KafkaSettings, Topics
from persistence.kafka.topics import former_ends

EndsByIncarnation = dict[tuple[str, str, int], tuple[int, int]]
"""(topic, topic id, partition) to the offset that the next record will get, and the leader epoch in which it will."""


def ask_ends(topics: Topics | None, names: Iterable[str]) -> EndsByIncarnation:
    """Ends of the root topics that can be queried; none without access to the broker.

    Raises:
        BrokerUnavailable: No broker answers.
    """
    ends: EndsByIncarnation = {}
    if topics is None:
        return ends
    for name in names:
        try:
            topic_id = topics.topic_ids([name])[name]
            found = topics.heads([name])
        except BrokerRefused:
            continue
        ends |= {(name, topic_id, partition): end for (_, partition), end in found.items()}
    return ends


def ids_of(ends: EndsByIncarnation) -> dict[str, str]:
    """Current id by topic."""
    return {topic: topic_id for topic, topic_id, _ in ends}


Read = Mapping[TopicPartition, tuple[int | None, int]]
"""By partition the leader epoch as of which it was read, None if it is not known, and the offset up to which it was."""


def check_source(topics: Topics, flow: Flow[Any], name: str, known: str, read: Read | None = None) -> None:
    """Check that a source of the flow still is the topic with this id, to which the run's offsets belong.

    Spark continues at its offsets in a topic that was created again if the new topic is long enough.

    Args:
        topics: Administrative access to topics.
        flow: The flow.
        name: The topic.
        known: Its id.
        read: What was read of it: its log must still have these records.

    Raises:
        RunRefusedError: It was created again, or lost records. No risk that was accepted at the start covers this.
        BrokerError: It cannot be queried.
    """
    if known == NO_ID:
        return
    now = topics.topic_ids([name])[name]
    if now != known:
        refuse([recreated(flow.name, name, known, now)], ())
    if asked := {place: one for place, one in (read or {}).items() if one[0] is not None}:
        check_logs(topics, flow, asked, topics.leader_epochs(asked))


def check_logs(
    topics: Topics, flow: Flow[Any], read: Read, epochs: Mapping[TopicPartition, int | None]
) -> dict[TopicPartition, int]:
    """Check that logs still have what was read of them: where the leader is another one, they may have lost it.

    Args:
        topics: Administrative access to topics.
        flow: The flow.
        read: What was read.
        epochs: Epoch of each partition's leader after that.

    Returns:
        Where the records end of the epochs as of which they were read, for the partitions with another leader.

    Raises:
        RunRefusedError: Records were lost.
        BrokerError: The broker does not answer, or refuses the request.
    """
    ends = former_ends(topics, {place: epoch for place, (epoch, _) in read.items()}, epochs)
    refuse(
        [
            cut(flow.name, f"{place.topic}:{place.partition}", read[place][1], max(end, 0), epochs[place])
            for place, end in sorted(ends.items())
            if end < read[place][1]
        ],
        (),
    )
    return ends


class RootTopics:
    """Facts about root topics: fetched by the driver, or by a task that is the first to see a root topic.

    Attributes:
        topic_ids: Current id by topic; the id of an unknown topic is fetched on lookup.
    """

    def __init__(
        self,
        ends: EndsByIncarnation,
        asked: Iterable[str],
        topic_ids: Mapping[str, str],
        kafka: KafkaSettings | None,
    ) -> None:
        self._ends = dict(ends)
        self._asked = set(asked)
        self._known = dict(topic_ids)
        self._kafka = kafka
        self.topic_ids: Mapping[str, str] = _TopicIds(self)

    def end(self, topic: str, topic_id: str, partition: int, cluster: str = "") -> tuple[int, int] | None:
        """The end of a root's partition, and the epoch of its leader; None when it cannot be known."""
        if cluster:
            return None
        self._ask(topic)
        return self._ends.get((topic, topic_id, partition))

    def current(self, topic: str) -> str:
        """The current id of a topic; empty when it cannot be known."""
        if topic not in self._known:
            self._ask(topic)
        return self._known.get(topic, "")

    def _ask(self, topic: str) -> None:
        if topic not in self._asked:
            self._asked.add(topic)
            if self._kafka is None:
                self._known.setdefault(topic, NO_ID)
                return
            found = ask_ends(topics_of(self._kafka), [topic])
            self._ends |= found
            self._known |= ids_of(found)

    def is_beyond(self, root: Node) -> bool:
        """Whether a root cannot exist."""
        end = self.end(root.topic, root.topic_id, root.partition, root.cluster)
        return end is not None and bool(is_beyond(root_number(root.offset, root.leader_epoch), *end))


def is_beyond(number: Any, end: Any, epoch: Any) -> Any:
    """Whether roots (`envelope.limits.root_number`) lie beyond an end, or in a later epoch; numbers or arrays of them."""
    return ((number & OFFSET_MASK) >= end) | ((number >> OFFSET_BITS) > epoch)


class _TopicIds(Mapping[str, str]):
    """`RootTopics.current` as a mapping; its length is the number of ids known so far."""

    def __init__(self, roots: RootTopics) -> None:
        self._roots = roots

    def __getitem__(self, topic: str) -> str:
        if not (found := self._roots.current(topic)):
            raise KeyError(topic)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._roots._known)

    def __len__(self) -> int:
        return len(self._roots._known)

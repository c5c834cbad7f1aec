"""What the broker has to say to a batch: which root can exist, and whether the source is still the same topic.

A root beyond the end of its topic would raise a lane's floor for ever. The ends are asked for after the batch was
delivered, so every real root is below them. A root topic that cannot be asked (of another cluster, deleted, or not
this user's to see) is believed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from aggregations.flow import Flow
from aggregations.reconcile import recreated, refuse
from aggregations.spark.clients import topics_of
from envelope import Node
from persistence.kafka import BrokerRefused, KafkaSettings, Topics

Ends = dict[tuple[str, str, int], int]
"""(topic, topic id, partition) to the offset that the next record will get."""

DETAIL = "its root's offset is beyond the end of the root topic"


def ask_ends(topics: Topics, names: Iterable[str]) -> Ends:
    """Ends of root topics, as far as they can be asked.

    Raises:
        BrokerUnavailable: No broker answers.
    """
    ends: Ends = {}
    for name in names:
        try:
            topic_id = topics.topic_ids([name])[name]
            found = topics.ends([name])
        except BrokerRefused:
            continue
        ends |= {(name, topic_id, partition): end for (_, partition), end in found.items()}
    return ends


def check_source(topics: Topics, flow: Flow[Any], topic_ids: Mapping[str, str]) -> None:
    """Return when the flow's source is still the topic whose offsets the run knows.

    Spark goes on at its offsets in a topic that was created again if that is long enough.

    Raises:
        RunRefusedError: It was created again. No risk that was accepted at the start covers that.
        BrokerError: It cannot be asked.
    """
    assert flow.topic is not None
    name = flow.topic.name
    now = topics.topic_ids([name])[name]
    if now != topic_ids[name]:
        refuse([recreated(flow.name, name, topic_ids[name], now)], ())


class Roots:
    """The ends that the driver asked for, and those of root topics that a task is the first to meet."""

    def __init__(self, known: Mapping[tuple[str, str, int], int], asked: Iterable[str], kafka: KafkaSettings) -> None:
        self._ends = dict(known)
        self._asked = set(asked)
        self._kafka = kafka

    def end(self, topic: str, topic_id: str, partition: int, cluster: str = "") -> int | None:
        """The end of a root's partition; None when it cannot be known."""
        if cluster:
            return None
        if topic not in self._asked:
            self._asked.add(topic)
            self._ends |= ask_ends(topics_of(self._kafka), [topic])
        return self._ends.get((topic, topic_id, partition))

    def is_beyond(self, root: Node) -> bool:
        """Whether a root cannot exist."""
        end = self.end(root.topic, root.topic_id, root.partition, root.cluster)
        return end is not None and root.offset >= end

"""How much a flow or a republisher has still to read: estimates for people, since both ends move on."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from aggregations.flow import Flow
from persistence.kafka import KafkaSettings, Topics
from persistence.manifest import minimum
from persistence.names import FlowRef
from persistence.registry import open_store


def backlog(flow: Flow[Any], kafka: KafkaSettings, stores: Mapping[str, str], generation: int = 1) -> int:
    """Return the number of records between what every store of the flow has and the end of its topic.

    It takes no term and changes nothing.

    Raises:
        BrokerError: Kafka does not answer, or there is no such topic.
        StoreError: A store does not answer.
    """
    assert flow.topic is not None
    topic = flow.topic.name
    with ExitStack() as opened:
        ref = FlowRef(flow.name, generation)
        handles = [opened.enter_context(closing(open_store(url))) for url in dict.fromkeys(stores.values())]
        start = minimum([store.load_manifest(ref) for store in handles]).get(topic, {})
    return _behind(kafka, [topic], {(topic, partition): offset for partition, offset in start.items()})


def unread(kafka: KafkaSettings, topics: Sequence[str], group: str) -> int:
    """Return the number of records of the topics that a consumer group has not committed.

    Raises:
        BrokerError: Kafka does not answer, or there is no such topic.
    """
    return _behind(kafka, topics, Topics(kafka).group_offsets(group))


def _behind(kafka: KafkaSettings, topics: Sequence[str], start: Mapping[tuple[str, int], int]) -> int:
    marks = Topics(kafka).marks(topics)
    return sum(max(ends.high - max(start.get(place, 0), ends.low), 0) for place, ends in marks.items())

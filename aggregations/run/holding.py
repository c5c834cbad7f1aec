"""Which partitions hold up the closing watermark although they are read to their end.

States that are due stay in the stores meanwhile. Unless the topic says when a partition is idle (`Topic(idle=)`), this
lasts until the partition has a record.
"""

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from aggregations.definition.expiry import Expiry
from aggregations.definition.flow import Flow
from aggregations.definition.times import EPOCH
from envelope import TopicPartition
from persistence.manifest import Progress


class Holder(NamedTuple):
    """A partition that holds up the closing watermark.

    Attributes:
        place: Topic and partition.
        time_us: The event time that it has reached, in microseconds since 1970; None if it had no event time yet.
    """

    place: TopicPartition
    time_us: int | None

    def __str__(self) -> str:
        if self.time_us is None:
            return f"{self.place.topic}:{self.place.partition} (no event time yet)"
        time = (EPOCH + timedelta(seconds=self.time_us // 1_000_000)).replace(tzinfo=None)
        return f"{self.place.topic}:{self.place.partition} (at {time.isoformat()}Z)"


def patience_us(flow: Flow[Any]) -> int | None:
    """How far a partition may be behind the others before it counts as a holder, in microseconds of event time.

    Returns:
        The shortest time after which a state of a stage can be due; None if no stage has states that become due.
    """
    found = [stage.aggregate.times for stage in flow.stages]
    spans = [one.ends_us(0) if isinstance(one, Expiry) else one.closes_us(0) for one in found if one is not None]
    return min(spans, default=None)


def holders(
    flow: Flow[Any],
    positions: Mapping[str, Mapping[int, Progress]],
    unread: Collection[TopicPartition],
) -> list[Holder]:
    """The partitions that hold up the closing watermark, those with the earliest event times first.

    Args:
        flow: The flow. Its tables, and topics with `idle=`, hold nothing up for ever.
        positions: Progress by topic and partition.
        unread: Partitions that have something to read.
    """
    patience = patience_us(flow)
    reached = {
        Holder(TopicPartition(topic, partition), progress.time_us)
        for topic in flow.parts[-1].topics
        for partition, progress in positions.get(topic, {}).items()
    }
    latest = max((one.time_us for one in reached if one.time_us is not None), default=None)
    if patience is None or latest is None:
        return []
    found = [
        one
        for one in reached
        if (one.time_us is None or latest - one.time_us > patience)
        and one.place not in unread
        and flow.topics[one.place.topic].idle_seconds is None
    ]
    return sorted(found, key=lambda one: (one.time_us is not None, one.time_us or 0, one.place))

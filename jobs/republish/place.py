"""The place of a static member in its group (`group.instance.id`), and who holds it.

When a broker was away for longer than a session, librdkafka gives its member id up, and commits without one or joins a second
time before the answer to the first join is there: the broker then says that the member was fenced, although nobody took
its place (librdkafka's pull request 5585; KAFKA-20985 is the same of the Java client). The consumer is dead, but the place is
still ours. A process that was frozen hears the same when its successor has the place, and must end. Member ids are the
coordinator's and given once. They tell the two apart, not client ids: the coordinator keeps the one of who was there first.
"""

import time
from collections.abc import Collection
from typing import Final

from jobs.republish.offsets import MemberFenced, patiently
from persistence.kafka import BrokerRefused, KafkaSettings, Topics

SESSION_MS: Final = 10_000  # a killed member gives its partitions up after that
INSTANCE: Final = "group.instance.id"
_SESSION: Final = "session.timeout.ms"
_GRACE_SECONDS: Final = 3.0  # for the coordinator to look at its clock
_PAUSE_SECONDS: Final = 1.0


def await_place(settings: KafkaSettings, group: str, own: Collection[str], fenced: MemberFenced) -> None:
    """Return when nobody else holds the place of a member that was fenced, so that a new consumer may take it.

    A member id that is not known may be of a join of our own that was never answered. Nobody speaks for that one, so
    it is gone when its session is over.

    Args:
        settings: Where Kafka is, and which place.
        group: The consumer group.
        own: Member ids that this process has had.
        fenced: What the broker said.

    Raises:
        BrokerRefused: Another process holds it.
    """
    topics, instance = Topics(settings), settings.options.get(INSTANCE, "")
    deadline = time.monotonic() + float(settings.options.get(_SESSION, SESSION_MS)) / 1000 + _GRACE_SECONDS
    while holder := patiently(lambda left: topics.static_member(group, instance)):
        if holder in own:
            return
        if time.monotonic() > deadline:
            raise BrokerRefused(
                f"group {group}: Static consumer fenced: another process has taken the place of {instance}",
                "Nothing is lost: the other process continues. Give each process its own instance name",
            ) from fenced
        time.sleep(_PAUSE_SECONDS)

"""The place of a static member in its group (`group.instance.id`), and which process holds it.

If a broker is unavailable for longer than a session, librdkafka drops its member id, and commits without one or joins a
second time before it has the answer to the first join: the broker then reports that the member was fenced, although no
other process took its place (librdkafka's pull request 5585; KAFKA-20985 is the same in the Java client). The consumer
can no longer be used, but the place still belongs to this process. A process that was frozen receives the same error
when its successor has the place, and must end. Member ids distinguish the two cases: the coordinator assigns each of
them once. Client ids do not: the coordinator keeps the client id of the first process.
"""

import time
from collections.abc import Collection
from typing import Final

from jobs.republish.offsets import MemberFenced, patiently
from persistence.kafka import BrokerRefused, KafkaSettings, Topics

SESSION_MS: Final = 10_000  # a killed member loses its partitions after that
INSTANCE: Final = "group.instance.id"
_SESSION: Final = "session.timeout.ms"
_GRACE_SECONDS: Final = 3.0  # for the coordinator to check its clock
_PAUSE_SECONDS: Final = 1.0


def await_place(settings: KafkaSettings, group: str, own: Collection[str], fenced: MemberFenced) -> None:
    """Return when no other process holds the place of a member that was fenced, so that a new consumer may take it.

    An unknown member id may come from a join of this process that was never answered. No consumer sends heartbeats for
    that id, so it disappears when its session ends.

    Args:
        settings: Settings of the Kafka cluster, with the `group.instance.id`.
        group: The consumer group.
        own: Member ids that this process has had.
        fenced: The broker's error.

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

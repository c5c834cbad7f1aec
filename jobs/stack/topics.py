"""Topics of a broker: created, described and deleted so that doing it twice does no harm."""

import time
from collections.abc import Iterable
from typing import Final

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient, NewTopic, TopicDescription

from jobs.stack.state import StackError

_SECONDS: Final = 30.0
_SETTLE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.1
_UNSETTLED: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_CONTROLLER,
    }
)


def create(bootstrap: str, name: str, partitions: int, **config: str | int) -> str:
    """Create a topic with one replica, unless it exists, and return its id once the broker knows it.

    Args:
        bootstrap: Broker address.
        name: Topic.
        partitions: Number of partitions.
        config: Topic settings, with `_` for each dot: `retention_ms=-1`.

    Raises:
        StackError: The broker refused or cannot be reached, or the topic exists with another number of partitions.
    """
    settings = {key.replace("_", "."): str(value) for key, value in config.items()}
    admin = _admin(bootstrap)
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=settings)
    try:
        admin.create_topics([topic], operation_timeout=_SECONDS)[name].result()
    except KafkaException as error:
        if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
            raise _failed(bootstrap, f"create topic {name}", error) from error
    described = _describe(admin, bootstrap, name)
    if len(described.partitions) != partitions:
        raise StackError(
            f"topic {name} exists with {len(described.partitions)} partitions, not {partitions}: "
            "delete it, or ask for as many as it has"
        )
    return str(described.topic_id)


def topic_ids(bootstrap: str, names: Iterable[str]) -> dict[str, str]:
    """Return the id of each topic, as standard base64; a topic that was deleted and created again has another.

    Raises:
        StackError: A topic does not exist, or the broker cannot be reached.
    """
    admin = _admin(bootstrap)
    return {name: str(_describe(admin, bootstrap, name).topic_id) for name in dict.fromkeys(names)}


def delete(bootstrap: str, *names: str) -> None:
    """Delete topics; one that does not exist is deleted already.

    Raises:
        StackError: The broker refused or cannot be reached.
    """
    if not names:
        return
    admin = _admin(bootstrap)
    for name, future in admin.delete_topics(list(names), operation_timeout=_SECONDS).items():
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise _failed(bootstrap, f"delete topic {name}", error) from error


def _admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def _describe(admin: AdminClient, bootstrap: str, name: str) -> TopicDescription:
    """Describe a topic. One that was just created may be unknown to the broker for a moment."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        try:
            found = admin.describe_topics(TopicCollection([name]), request_timeout=_SECONDS)
            description: TopicDescription = found[name].result()
            return description
        except KafkaException as error:
            if error.args[0].code() not in _UNSETTLED or time.monotonic() > deadline:
                raise _failed(bootstrap, f"describe topic {name}", error) from error
            time.sleep(_POLL_SECONDS)


def _failed(bootstrap: str, what: str, error: KafkaException) -> StackError:
    return StackError(f"Kafka at {bootstrap} did not {what} ({error.args[0].name()}): see `headwater stack status`")

"""Functions for topics of the local broker."""

from persistence.kafka import KafkaSettings, Topics


def create(bootstrap: str, name: str, partitions: int, **config: str | int) -> str:
    """Create a topic if it does not exist, and return its id when it can be used.

    Args:
        bootstrap: Broker address.
        name: Topic.
        partitions: Number of partitions.
        config: Topic settings, with `_` for each dot: `retention_ms=-1`.

    Raises:
        BrokerError: It exists with another number of partitions, or the broker refused or does not answer.
    """
    settings = {key.replace("_", "."): str(value) for key, value in config.items()}
    return _topics(bootstrap).create(name, partitions, settings).topic_id


def topic_ids(bootstrap: str, names: list[str]) -> dict[str, str]:
    """Return the current id of each topic. A topic that was deleted and created again has a new id.

    Raises:
        BrokerError: A topic does not exist, or the broker does not answer.
    """
    return _topics(bootstrap).topic_ids(names)


def delete(bootstrap: str, *names: str) -> None:
    """Delete the topics that exist, and wait until they are gone.

    Raises:
        BrokerError: The broker refused or does not answer.
    """
    _topics(bootstrap).delete(names)


def _topics(bootstrap: str) -> Topics:
    return Topics(KafkaSettings(bootstrap), timeout=30)

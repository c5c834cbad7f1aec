"""Errors of requests to Kafka, named by what the caller does next.

All of them survive pickling (they cross from Spark's workers to the driver), are one line,
say what was tried and end with the remedy. None quotes a record or a setting's value.
"""

import re
from typing import Final

from confluent_kafka import KafkaError, KafkaException


class BrokerError(Exception):
    """A request to Kafka that did not succeed.

    Attributes:
        what: What was tried, and what the broker or the client answered.
        remedy: What to do about it.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


class BrokerUnavailable(BrokerError):
    """No answer, or not yet: a later retry may succeed. Whether a write took effect is unknown."""


class BrokerRefused(BrokerError):
    """A retry cannot succeed until an operator changes a topic, a permission or a setting."""


class TopicMissing(BrokerRefused):
    """A topic does not exist, or no longer exists: a retry succeeds once the topic is created."""


UNREACHABLE_REMEDY: Final = "Check that the broker runs and that the bootstrap address is right"
MISSING_TOPIC_REMEDY: Final = "Create the topic, or correct its name; headwater does not create topics automatically"
_CREDENTIALS = "Check security.protocol, the credentials and the CA certificate"
_SECURITY: Final = re.compile(r"(?i)authenticat|sasl error|sasl .*(handshake|token)|ssl handshake|certificate")
_SOON = "The cluster is electing a leader: try again"
_RIGHTS = "Grant this user the permission (kafka-acls), or use another user"

_MISSING: Final = (
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError.UNKNOWN_TOPIC_ID,  # for a deleted topic, until the client has refreshed its metadata
)
_REFUSED: Final[dict[int, str]] = {
    KafkaError._UNKNOWN_PARTITION: "The topic has fewer partitions than expected: check it with kafka-topics",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: _RIGHTS,
    KafkaError.GROUP_AUTHORIZATION_FAILED: _RIGHTS,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: _RIGHTS,
    KafkaError.SASL_AUTHENTICATION_FAILED: _CREDENTIALS,
    KafkaError._AUTHENTICATION: _CREDENTIALS,
    KafkaError._SSL: _CREDENTIALS,
    KafkaError.MSG_SIZE_TOO_LARGE: "Raise max.message.bytes of the topic, or send smaller messages. If the Kafka settings "
    "contain message.max.bytes, raise it as well",
    KafkaError.TOPIC_EXCEPTION: "Topic names have 1 to 249 letters, digits, dots, underscores and dashes",
    KafkaError.INVALID_PARTITIONS: "Partitions can be added to a topic, but not removed",
    KafkaError.UNKNOWN_MEMBER_ID: "The group has running members: stop them first",
    KafkaError.NON_EMPTY_GROUP: "The group has running members: stop them first",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "Members of a group need the same assignment strategy: "
    "set partition.assignment.strategy to the same value, or use another group",
    KafkaError._GAPLESS_GUARANTEE: "Nothing is sent after a refused record. The text gives the reason; if it is too large, "
    "raise max.message.bytes of the topic, or send smaller messages",
    KafkaError._FATAL: "The client library reported a fatal error: start again; nothing is lost",
    KafkaError._INVALID_ARG: "Correct the setting; the names are librdkafka's",
    KafkaError.INVALID_CONFIG: "Correct the topic's configuration",
}
_UNAVAILABLE: Final[dict[int, str]] = {
    KafkaError._TRANSPORT: UNREACHABLE_REMEDY,
    KafkaError._ALL_BROKERS_DOWN: UNREACHABLE_REMEDY,
    KafkaError._RESOLVE: UNREACHABLE_REMEDY,
    KafkaError._TIMED_OUT: UNREACHABLE_REMEDY,
    KafkaError._WAIT_COORD: UNREACHABLE_REMEDY,
    KafkaError._MSG_TIMED_OUT: UNREACHABLE_REMEDY,
    KafkaError.NOT_LEADER_FOR_PARTITION: _SOON,
    KafkaError.LEADER_NOT_AVAILABLE: _SOON,
    KafkaError.FENCED_LEADER_EPOCH: _SOON,  # a broker that was frozen leads the partition again
    KafkaError.UNKNOWN_LEADER_EPOCH: _SOON,
    KafkaError._NOENT: _SOON,  # of librdkafka: no partition that was asked for has a leader
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS: _SOON,
    KafkaError.COORDINATOR_NOT_AVAILABLE: _SOON,
    KafkaError.NOT_COORDINATOR: _SOON,
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER: "Send again what was not acknowledged",
    KafkaError.NOT_ENOUGH_REPLICAS: "Start the brokers that are missing, or lower the topic's min.insync.replicas",
}


STALE_EPOCH: Final = (KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH)
"""The client has another epoch of a partition's leader than the broker: the metadata is old, or newer than the leader."""
NOT_YET: Final = (
    *STALE_EPOCH,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError._NOENT,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
)
"""A new topic is not yet known to every broker, or a group has no coordinator yet."""


def broker_error(error: KafkaError, doing: str, hint: str = "") -> BrokerError:
    """Return the error to raise for Kafka's `error`.

    Args:
        error: What the client library reported.
        doing: What was tried, with the topic or group it was about.
        hint: What the connection reported before, for the case that `error` is only a timeout.
    """
    answer = error.str() if not hint else f"{error.str()} ({hint})"
    what = f"{doing}: {answer}".rstrip(". ")
    if error.code() in _MISSING:
        return TopicMissing(what, MISSING_TOPIC_REMEDY)
    if remedy := _REFUSED.get(error.code()):
        return BrokerRefused(what, remedy)
    if remedy := _UNAVAILABLE.get(error.code()):
        return unreachable(what, hint) if remedy is UNREACHABLE_REMEDY else BrokerUnavailable(what, remedy)
    if error.fatal() or not error.retriable():
        return BrokerRefused(what, f"Kafka's error code is {error.name()}; the broker's log may say more")
    return BrokerUnavailable(what, f"Kafka's error code is {error.name()}; try again")


def unreachable(what: str, hint: str) -> BrokerUnavailable:
    """Return the error for a missing answer; a wrong password or certificate also appears as a missing answer.

    Args:
        what: What was tried.
        hint: What the connection reported before; empty when it reported nothing.
    """
    return BrokerUnavailable(what, _CREDENTIALS if _SECURITY.search(hint) else UNREACHABLE_REMEDY)


def passes(error: KafkaError) -> bool:
    """Whether a consumer with manually assigned partitions that commits nothing may ignore an error.

    It needs no permission for its group, which it never joins, but the client library still looks up the coordinator.
    """
    return error.retriable() or error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED


def connection_trouble(error: KafkaError, before: str) -> str:
    """What librdkafka reports about a connection, without the time that it spent in a state.

    Args:
        error: Its report. That all brokers are down only counts what was reported, so it replaces nothing.
        before: What was reported before; empty for nothing.
    """
    if before and error.code() == KafkaError._ALL_BROKERS_DOWN:
        return before
    return re.sub(r" \(after (?:[^()]|\([^()]*\))*\)", "", error.str())


def rejects_login(error: Exception) -> bool:
    """Whether Kafka does not answer because of the security settings, as far as the connection reported it.

    A handshake during which the connection broke does not count: so does one with a broker that is starting.
    """
    return isinstance(error, BrokerUnavailable) and error.remedy == _CREDENTIALS and "Disconnected" not in error.what


def is_any(error: BrokerError, *codes: int) -> bool:
    """Whether Kafka's error behind an error has one of these codes."""
    cause = error.__cause__
    return isinstance(cause, KafkaException) and cause.args[0].code() in codes

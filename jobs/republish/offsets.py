"""The offsets of a consumer group: each is committed with the id of the topic that it counts in, and more; see `Note`."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from jobs.republish.growth import Note
from persistence.kafka import BrokerError, BrokerRefused, BrokerUnavailable
from persistence.kafka.errors import UNREACHABLE_REMEDY, broker_error

T = TypeVar("T")

PATIENCE_SECONDS: Final = 60.0  # a fifth of max.poll.interval.ms, after which the group would give us up
_LEAST_SECONDS: Final = 1.0  # for an answer, however late it is
_PAUSE_SECONDS: Final = 0.2
# The group is being dealt out again. What was not committed stays to be committed by whoever has the partition then.
_OVERTAKEN: Final = (
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError._ASSIGNMENT_LOST,
    KafkaError._STATE,
)
_FENCED: Final = (KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL)  # a consumer knows no other fatal error


class MemberFenced(BrokerRefused):
    """The coordinator takes this static member for one that was replaced; its consumer is of no use any more."""


def failure(error: KafkaError, doing: str, hint: str = "") -> BrokerError:
    """Return the error to raise for what a consumer reports: as `broker_error`, and `MemberFenced`."""
    if error.code() in _FENCED:
        return MemberFenced(f"{doing}: {error.str()}", "Start again; nothing is lost")
    return broker_error(error, doing, hint)


def committed(consumer: Consumer, parts: Sequence[TopicPartition], hint: str) -> list[TopicPartition]:
    """Return what the group has committed of partitions.

    Args:
        consumer: A member of the group.
        parts: The partitions.
        hint: What the connection reported.

    Raises:
        BrokerError: The group's coordinator refused or did not answer.
    """
    doing = "reading the committed offsets"
    try:
        found: list[TopicPartition] = consumer.committed(list(parts), timeout=10)
    except KafkaException as error:
        raise failure(error.args[0], doing, hint) from error
    for at in found:
        if at.error:
            raise failure(at.error, f"{doing}, {at.topic}:{at.partition}")
    return found


def is_of_another_topic(at: TopicPartition, topic_id: str) -> bool:
    """Whether a committed offset counts in an earlier topic of the same name: it was committed when that was gone.

    One without an id, as other tools set them, is believed.
    """
    return at.offset >= 0 and Note.read(at.metadata).topic_id not in ("", topic_id)


def commit_offsets(consumer: Consumer, offsets: list[TopicPartition], timeout: float, hint: str) -> list[bool]:
    """Commit offsets, and say of each whether it is.

    Args:
        consumer: A member of the group.
        offsets: What to commit, each with its `Note`.
        timeout: Seconds to wait.
        hint: What the connection reported.

    Raises:
        BrokerError: The group's coordinator refused or did not answer.
    """
    doing = "committing the input offsets"
    try:
        results = _within(timeout, lambda: consumer.commit(offsets=offsets, asynchronous=False))
    except TimeoutError:
        more = f" ({hint})" if hint else ""
        raise BrokerUnavailable(f"{doing}: no answer for {timeout:.0f} s{more}", UNREACHABLE_REMEDY) from None
    except KafkaException as error:
        if error.args[0].code() not in _OVERTAKEN:
            raise failure(error.args[0], doing, hint) from error
        return [False] * len(offsets)
    for at in results:
        if at.error and at.error.code() not in _OVERTAKEN:
            raise failure(at.error, f"{doing}, {at.topic}:{at.partition}")
    return [at.error is None for at in results]


def patiently(action: Callable[[float], T], timeout: float | None = None) -> T:
    """Ask again while a broker is away or a coordinator is on its way.

    Args:
        action: What to do; it gets the seconds that are left.
        timeout: Seconds to go on; None for a minute.

    Raises:
        BrokerUnavailable: It still is.
    """
    deadline = time.monotonic() + (PATIENCE_SECONDS if timeout is None else timeout)
    while True:
        try:
            return action(max(deadline - time.monotonic(), _LEAST_SECONDS))
        except BrokerUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _within(timeout: float, action: Callable[[], T]) -> T:
    """Call in a thread of its own, and wait no longer than `timeout` seconds.

    A commit has no timeout in librdkafka: it waits for a coordinator for as long as there is none.

    Raises:
        TimeoutError: It has not returned.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((action(), None))
        except BaseException as error:  # it is raised where the answer is waited for
            answers.put((None, error))

    threading.Thread(target=call, name="headwater-commit", daemon=True).start()
    try:
        answer, error = answers.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast("T", answer)

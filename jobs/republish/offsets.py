"""Offsets of a consumer group: each is committed with the id of its topic, and more; see `Note`."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

import envelope
from jobs.republish.absence import Unsafe
from jobs.republish.growth import Note
from persistence.kafka import BrokerError, BrokerRefused, BrokerUnavailable, Topics
from persistence.kafka.errors import UNREACHABLE_REMEDY, broker_error
from persistence.kafka.facts import BEYOND_END, Watermarks
from persistence.kafka.tail import BlockReader
from persistence.kafka.topics import former_ends

T = TypeVar("T")
Read: TypeAlias = Mapping[Any, tuple[int, int | None]]
_LOG = logging.getLogger("headwater.republish")

PATIENCE_SECONDS: Final = 60.0  # a fifth of max.poll.interval.ms, after which the group would remove this member
_LEAST_SECONDS: Final = 1.0  # least time to wait for an answer, even after the deadline
_PAUSE_SECONDS: Final = 0.2
# The group is rebalancing. The next owner of a partition reads and commits its uncommitted records.
_OVERTAKEN: Final = (
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError._ASSIGNMENT_LOST,
    KafkaError._STATE,
)
_FENCED: Final = (KafkaError.FENCED_INSTANCE_ID, KafkaError._FATAL)  # a consumer knows no other fatal error


class MemberFenced(BrokerRefused):
    """The coordinator considers this static member replaced; its consumer can no longer be used."""


def failure(error: KafkaError, doing: str, hint: str = "") -> BrokerError:
    """Convert an error that a consumer reports: as `broker_error`, or to `MemberFenced`."""
    if error.code() in _FENCED:
        return MemberFenced(f"{doing}: {error.str()}", "Start again; nothing is lost")
    return broker_error(error, doing, hint)


def committed(consumer: Consumer, parts: Sequence[TopicPartition], hint: str) -> list[TopicPartition]:
    """Return the group's committed offsets of partitions.

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


def lost_ends(topics: Topics, read: Read, marks: Mapping[envelope.TopicPartition, Watermarks]) -> dict[Any, int]:
    """Return where logs end, or were cut and written anew (KIP-320), below what was read of them; only these logs.

    A log was not cut if it has no record there: what was read last are markers of transactions, in a later leader epoch.

    Args:
        topics: Access to topics.
        read: By topic and partition the offset up to which it was read, and the leader epoch of the last record.
        marks: The ends of the logs.
    """
    epochs = {place: epoch for place, (_, epoch) in read.items()}
    ends = former_ends(topics, epochs, {place: marks[place].leader_epoch for place in read})
    found = {place: min(ends.get(place, offset), marks[place].high) for place, (offset, _) in read.items()}
    lost = {place: max(end, 0) for place, end in found.items() if end < read[place][0]}
    return {
        place: end
        for place, end in lost.items()
        if marks[place].high < read[place][0] or _has_records(topics, place, end, read[place][0])
    }


def _has_records(topics: Topics, place: Any, first: int, end: int) -> bool:
    """Whether a partition has a committed record at one of these offsets."""
    with BlockReader(topics.settings, place[0]) as reader:
        return next(reader.read({place[1]: (first, end)}), None) is not None


def check_lost(lost: Mapping[Any, int], read: Read, accept: Collection[str], did: str) -> None:
    """Refuse logs that lost records, unless that is accepted.

    Args:
        lost: From `lost_ends`.
        read: As there.
        accept: Names of accepted risks.
        did: What was done with the records, as in "republished".

    Raises:
        Unsafe: The risk is not accepted.
    """
    for (topic, partition), end in sorted(lost.items()):
        what = (
            f"{topic}:{partition} is {did} up to {read[topic, partition][0]}, but the broker lost its records from offset {end} "
            "on, and gives these offsets to other records"
        )
        if BEYOND_END not in accept:
            raise Unsafe(
                what, f"Accept the risk to resume at offset {end} with the new records (--accept {BEYOND_END})"
            )
        _LOG.warning("%s", what)


def is_of_another_topic(at: TopicPartition, topic_id: str) -> bool:
    """Whether a committed offset belongs to an earlier topic of the same name, which was deleted since.

    An offset without an id, as other tools set them, counts as one of the current topic.
    """
    return at.offset >= 0 and Note.read(at.metadata).topic_id not in ("", topic_id)


def commit_offsets(consumer: Consumer, offsets: list[TopicPartition], timeout: float, hint: str) -> list[bool]:
    """Commit offsets, and return for each whether it was committed.

    Args:
        consumer: A member of the group.
        offsets: Offsets to commit, each with its `Note`.
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


def commit_in_callback(
    consumer: Consumer, offsets: list[TopicPartition], timeout: float | None, hint: str, *, closing: bool = False
) -> list[bool]:
    """Commit offsets within a callback of the consumer, and return for each whether it was committed.

    A commit that waits for its answer could wait for ever, and another thread, which could be left alone with it, may not
    use the consumer meanwhile: since confluent-kafka 2.16 its calls wait for each other. So this one does not wait; the
    group's coordinator answers in the order of the requests, and the offsets that it then has show what became of it.

    Args:
        consumer: A member of the group.
        offsets: Offsets to commit, each with its `Note`.
        timeout: Seconds to ask again while the coordinator is unavailable; None for a minute.
        hint: What the connection reported.
        closing: The consumer is being closed. It then answers no question for committed offsets (librdkafka says
            `_WAIT_COORD` instead), but waits for its commits before it ends: the result is False for each.

    Raises:
        BrokerError: The group's coordinator refused or did not answer.
    """
    try:
        consumer.commit(offsets=offsets, asynchronous=True)
    except KafkaException as error:
        if error.args[0].code() not in _OVERTAKEN:
            raise failure(error.args[0], "committing the input offsets", hint) from error
        return [False] * len(offsets)
    if closing:
        return [False] * len(offsets)
    answer = patiently(lambda left: committed(consumer, offsets, hint), timeout)
    found = {(at.topic, at.partition): (at.offset, at.metadata) for at in answer}
    return [found.get((at.topic, at.partition)) == (at.offset, at.metadata) for at in offsets]


def patiently(
    action: Callable[[float], T],
    timeout: float | None = None,
    on: type[Exception] | tuple[type[Exception], ...] = BrokerUnavailable,
) -> T:
    """Retry while a broker is unavailable or a coordinator is being elected.

    Args:
        action: Request to retry; it receives the remaining seconds.
        timeout: Seconds to retry; None for a minute.
        on: Errors after which it retries.

    Raises:
        BrokerUnavailable: The broker or coordinator is still unavailable.
    """
    deadline = time.monotonic() + (PATIENCE_SECONDS if timeout is None else timeout)
    while True:
        try:
            return action(max(deadline - time.monotonic(), _LEAST_SECONDS))
        except on:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _within(timeout: float, action: Callable[[], T]) -> T:
    """Call `action` in a separate thread, and wait at most `timeout` seconds.

    A commit has no timeout in librdkafka: it waits until there is a coordinator.

    Raises:
        TimeoutError: The call has not returned in time.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((action(), None))
        except BaseException as error:  # it is raised in the waiting thread
            answers.put((None, error))

    threading.Thread(target=call, name="headwater-commit", daemon=True).start()
    try:
        answer, error = answers.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return cast("T", answer)

"""Publishes outputs and dead letters of a task: all are acknowledged before anything is persisted."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from confluent_kafka import Consumer, TopicPartition

from aggregations.definition.element import Record
from aggregations.engine.clients import NEEDED, max_message_bytes, producer_of, store_of
from aggregations.engine.held import hold
from aggregations.engine.job import Job
from aggregations.engine.path import Work
from aggregations.errors import RunRefusedError
from aggregations.per_message.dead_letters import RejectedRecord
from aggregations.per_message.publishing import OutputMessage
from aggregations.run.held_outputs import hold_outputs
from envelope import TopicPartition as Place
from envelope.deadletter import DeadLetterHeaders, Form, dead_letter_record
from persistence.commit.faults import DEAD_LETTER, effect
from persistence.commit.steps import CommitStep
from persistence.kafka import BrokerUnavailable, KafkaSettings, Message
from persistence.kafka.errors import passes
from persistence.kafka.headers import headers_of
from persistence.kafka.reading import assign

_SLICE = 10_000  # outputs that are handed to the producer at once
_SILENCE_SECONDS = 30.0
"""Longest time without a record, in seconds, before the broker counts as unavailable."""


def publish(work: Work) -> None:
    """Produce the outputs and dead letters of a task and return when all are acknowledged; count them.

    Of a job that sends nothing they are only counted. Of a rebuild the dead letters are held, and the outputs if this was
    asked for.

    Raises:
        BrokerError: One was not acknowledged.
        RunRefusedError: There are dead letters and the flow has no dead-letter topic.
    """
    dead, options = list(work.collector.dead.values()), work.job.options
    if options.sends:
        effect(CommitStep.PUBLISH, lambda: produce_outputs(options.kafka, work.outputs, work.job.progress.largest))
    elif options.rebuilding is not None and options.rebuilding.outputs:
        effect(CommitStep.PUBLISH, lambda: _hold(work.job, work.outputs))
    if dead and (options.sends or options.rebuilding is not None):
        effect(DEAD_LETTER, lambda: _dead_letters(work.job, dead))
    work.report.counts.outputs += len(work.outputs)
    # Only here, because items of one record that failed in several tasks are one dead letter.
    work.report.counts.reasons.update(one.reason.value for one in dead)
    work.report.counts.raised.update(one.cause for one in dead if one.raised)
    work.outputs.clear()
    work.collector.dead.clear()


def produce_outputs(kafka: KafkaSettings | None, outputs: Sequence[OutputMessage], largest: Mapping[str, int]) -> None:
    """Produce messages and return when all are acknowledged.

    Args:
        kafka: Settings of the Kafka cluster; None only if there are no messages.
        outputs: The messages, in order.
        largest: Largest record that can be produced to a topic, in bytes, by topic.

    Raises:
        BrokerError: One was not acknowledged.
    """
    if not outputs:
        return
    assert kafka is not None
    producer = producer_of(kafka, largest.values())
    topics: dict[str, list[Message]] = {}  # the order within a partition matters, not that among topics
    for output in outputs:
        message = Message(value=output.value, key=output.key)
        if output.headers:
            message["headers"] = output.headers
        topics.setdefault(output.topic, []).append(message)
    for topic, messages in topics.items():
        for start in range(0, len(messages), _SLICE):
            producer.send_many(topic, messages[start : start + _SLICE])
    producer.flush()


def _hold(job: Job, outputs: Sequence[OutputMessage]) -> None:
    """Hold outputs of a rebuild. The swap publishes all states, so it needs no snapshots of them."""
    if made := [one for one in outputs if one.own is not None]:
        store, progress = store_of(next(iter(job.options.urls.values()))), job.progress
        hold_outputs(store, progress.ref, made, epoch=progress.epoch, batch=progress.batch, attempt=job.attempt.serial)


def _dead_letters(job: Job, dead: Sequence[RejectedRecord]) -> None:
    if (topic := job.options.dead_letters) is None:
        first = dead[0]
        raise RunRefusedError(
            f"flow {job.flow.name}: {first.own} cannot be used ({first.reason.value}: {first.detail}), and the flow has no "
            f"dead-letter topic. Set one with --dead-letters. Such records in this batch: {len(dead)}"
        )
    kafka = job.options.broker
    size = max_message_bytes(kafka, topic)
    by_record: dict[tuple[str, int, int], list[RejectedRecord]] = {}
    for one in dead:
        by_record.setdefault((one.own.topic, one.own.partition, one.own.offset), []).append(one)
    producer = None if job.options.rebuilding is not None else producer_of(kafka, [size])
    now = int(time.time() * 1000)
    for record in fetch_records(job, by_record):
        for one in by_record[record.topic, record.partition, record.offset]:
            message = dead_letter_record(
                _letter(job, one, now, record.timestamp_ms), record.key, record.value, record.headers, size
            )
            if producer is None:
                hold(job, topic, _name(one), message)
            else:
                producer.send(topic, message.value, message.key, message.headers)
    if producer is not None:
        producer.flush()


def _name(dead: RejectedRecord) -> str:
    """What distinguishes a dead letter from the others of a flow: its record, stage and items."""
    return f"{dead.own.topic}:{dead.own.partition}:{dead.own.offset} {dead.stage} {dead.items}"


def _letter(job: Job, dead: RejectedRecord, now_ms: int, timestamp_ms: int) -> DeadLetterHeaders:
    own, topic = dead.own, job.flow.source_of(dead.own.topic)
    return DeadLetterHeaders(
        own.topic,
        own.partition,
        own.offset,
        dead.reason,
        topic_id=own.topic_id,
        lineage=dead.lineage or str(own),
        stage=dead.stage,
        application=job.progress.ref.flow,
        time_ms=now_ms,
        hole=dead.hole,
        generation=job.progress.ref.generation,
        items=dead.items,
        form=Form.ENVELOPE if topic.envelope else Form.PAYLOAD,
        detail=dead.detail,
        raised=dead.raised,
        timestamp_ms=timestamp_ms,
    )


def fetch_records(job: Job, places: Iterable[tuple[str, int, int]]) -> Iterator[Record]:
    """Read records again by their topic, partition and offset: key, value and headers byte for byte.

    They are yielded one by one: a batch that consists of dead letters need not fit into memory a second time.
    Keeping every record's headers and bytes throughout the flow for a few dead letters would cost more.

    Raises:
        BrokerUnavailable: The broker does not return them.
    """
    wanted: dict[Place, set[int]] = {}
    for topic, partition, offset in places:
        wanted.setdefault(Place(topic, partition), set()).add(offset)
    consumer = Consumer(job.options.broker.client(group_id=f"headwater-{job.flow.name}-dead-letters") | NEEDED)
    try:
        for place, offsets in wanted.items():
            border = 0 if job.archive is None else job.archive.until.get(place, 0)
            archived = {offset for offset in offsets if offset < border}
            if job.archive is not None and archived:
                yield from job.archive.chosen(place, archived)
            yield from _read(consumer, *place, offsets - archived)
    finally:
        consumer.close()


def _read(consumer: Consumer, topic: str, partition: int, offsets: set[int]) -> Iterator[Record]:
    todo = deque(sorted(offsets))
    deadline = time.monotonic() + _SILENCE_SECONDS
    at = -1
    while todo:
        # A small gap is read and discarded; a large one is skipped.
        if at < 0 or todo[0] - at > 1000:
            assign(consumer, [TopicPartition(topic, partition, todo[0])])
            at = todo[0]
        message = consumer.poll(1.0)
        error = message.error() if message is not None else None
        if message is None or error is not None:
            if time.monotonic() < deadline and (error is None or passes(error)):
                continue
            raise BrokerUnavailable(
                f"reading {topic}:{partition}:{todo[0]} for the dead-letter topic: {error.str() if error else 'no answer'}",
                "The batch is retried; nothing was committed",
            )
        offset = message.offset()
        assert offset is not None
        at, deadline = offset, time.monotonic() + _SILENCE_SECONDS
        if offset > todo[0]:
            raise BrokerUnavailable(
                f"{topic}:{partition}:{todo[0]} was deleted before it could go to the dead-letter topic",
                "Increase the topic's retention, then start again",
            )
        if offset == todo[0]:
            todo.popleft()
            headers = tuple(headers_of(message))
            yield Record(topic, partition, offset, message.key(), message.value(), message.timestamp()[1], headers)

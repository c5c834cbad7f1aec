"""Bugs of where records go: between members of a group, to several targets, and without a key."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from confluent_kafka import TopicPartition

from aggregations.per_message import loop
from aggregations.per_message.arrivals import arrive
from aggregations.per_message.steps import Applied
from jobs.republish import input as reading
from jobs.republish import worker
from jobs.republish.offsets import commit_offsets
from jobs.republish.processor import Processor
from jobs.republish.record import KEEP
from tests.simulation.patch import Patch, original

_on_assign = original(reading.Input, "_on_assign")
_commit = original(reading.Input, "commit")
_process = original(worker.Worker, "_process")
_send = original(worker._Outbox, "send")
_outgoing = original(Processor, "_outgoing")


def _hands_on_unflushed(self: Any, consumer: Any, gone: Any) -> None:
    self.commit()
    self._forget(gone)


def _begins_late_ones_at_their_end(self: Any, consumer: Any, added: Any) -> None:
    later = self.assigned
    _on_assign(self, consumer, added)
    for at in added if later else ():
        _, high = consumer.get_watermark_offsets(at)
        consumer.seek(TopicPartition(at.topic, at.partition, high))
        self.partitions[at.topic, at.partition].next = high


def _commits_for_others(self: Any, timeout: float | None = None) -> None:
    _commit(self, timeout)
    ids = {part.topic: part.topic_id for part in self.partitions.values()}
    others = [
        TopicPartition(topic, number, marks.high, metadata=ids[topic])
        for (topic, number), marks in self._topics.marks(ids).items()
        if (topic, number) not in self.partitions
    ]
    if others:
        commit_offsets(self._consumer, others, 1, "")


def _to_the_first_target(self: Any, record: Any, rewriter: Any, hops: Any, output: Any, *place: int) -> Any:
    return _outgoing(self, record, rewriter, hops, output._replace(topic=None), *place)


def _sends_the_first_topic_only(self: Any, producer: Any) -> None:
    for messages in [*self._topics.values()][1:]:
        messages.clear()
    _send(self, producer)


def _leaves_out_keyless(self: Any, record: Any, part: Any) -> Any:
    if record.key is not None:
        return _process(self, record, part)
    self._counts.consumed += 1
    return ()


def _gives_no_key(self: Any, record: Any, rewriter: Any, hops: Any, output: Any, *place: int) -> Any:
    made = output._replace(key=KEEP) if record.key is None else output
    return _outgoing(self, record, rewriter, hops, made, *place)


def _arrive_with_keys(stage: Any, applied: Applied, **options: Any) -> Any:
    return arrive(stage, replace(applied, elements=[one for one in applied.elements if one.key is not None]), **options)


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "service-hands-on-unflushed": (
        "a republisher gives partitions up and commits them before its outputs are acknowledged",
        [(reading.Input, "_on_revoke", _hands_on_unflushed)],
    ),
    "service-skips-what-it-is-given": (
        "a republisher begins partitions that it gets from another member at their end",
        [(reading.Input, "_on_assign", _begins_late_ones_at_their_end)],
    ),
    "service-commits-for-others": (
        "a member of a republisher's group commits the ends of partitions that other members read",
        [(reading.Input, "commit", _commits_for_others)],
    ),
    "service-knows-one-target": (
        "a republisher with several targets sends everything to the first",
        [(Processor, "_outgoing", _to_the_first_target)],
    ),
    "service-forgets-other-topics": (
        "a republisher sends what goes to the first topic of a slice, and forgets the others",
        [(worker._Outbox, "send", _sends_the_first_topic_only)],
    ),
    "service-leaves-out-keyless": (
        "a republisher commits records without a key and makes nothing of them",
        [(worker.Worker, "_process", _leaves_out_keyless)],
    ),
    "service-gives-no-key": (
        "what a republisher makes of a record without a key has none either",
        [(Processor, "_outgoing", _gives_no_key)],
    ),
    "keyless-left-out": (
        "a stage takes no records without a key, whatever its own key is",
        [(loop, "arrive", _arrive_with_keys)],
    ),
}

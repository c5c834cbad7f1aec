"""Bugs of what runs: the driver and republish services."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from confluent_kafka import OFFSET_END, OFFSET_INVALID, KafkaError, TopicPartition

from aggregations.run.plan import Plan, plan
from envelope.hops import HopWriter
from jobs.republish import input as reading
from jobs.republish import loop, processor, worker
from jobs.republish.columns import Columns
from jobs.republish.express import Express
from jobs.republish.topic_check import TopicCheck, TopicReplaced
from persistence.commit.faults import (
    REPUBLISH_COMMIT,
    REPUBLISH_DEAD_LETTER,
    REPUBLISH_FLUSH,
    REPUBLISH_PRODUCE,
    effect,
)
from persistence.commit.steps import CommitStep
from persistence.errors import Transient
from persistence.kafka import BrokerError, producer
from tests.simulation import driver
from tests.simulation.patch import Patch, original

_Driver = driver.Driver
_init = original(_Driver, "__init__")
_batch = original(_Driver, "batch")


def _from_the_end(*arguments: Any, **options: Any) -> Plan:
    made = plan(*arguments, **options)
    return replace(
        made, partitions=[replace(one, start=one.high) if one.start is None else one for one in made.partitions]
    )


def _from_the_group(self: Any, *arguments: Any, **options: Any) -> None:
    _init(self, *arguments, **options)
    self.next = {place: self._cluster.committed(self.name, *place) for place, _ in self._partitions()}


def _offsets_first(self: Any, limit: int, slow: int = -1) -> None:
    records = self.records(limit, slow)
    self.advance(records)
    effect(CommitStep.OFFSETS, self.commit)
    self.runner.process(records)
    effect(CommitStep.RETURN, lambda: None)


def _skips_a_failed_batch(self: Any, limit: int, slow: int = -1) -> None:
    records = self.records(limit, slow)
    try:
        _batch(self, limit, slow)
    except Transient:
        self.advance(records)


def _commits_first(self: Any, timeout: float | None = None) -> None:
    """Steps 4 to 6 in another order."""
    if self._worker.pending:
        effect(REPUBLISH_COMMIT, lambda: self._input.commit(timeout))
        self._worker.finish(timeout)
        self._of.statistics.add(self._worker.take_counts())


def _no_flush(self: Any, timeout: float | None = None) -> None:
    if self._dead:
        effect(REPUBLISH_DEAD_LETTER, lambda: self._publish_dead_letters(timeout))


def _no_letters(self: Any, timeout: float | None = None) -> None:
    effect(REPUBLISH_FLUSH, lambda: self._producer.flush(timeout))


def _swallows(self: Any, timeout: float | None = None) -> None:
    with suppress(BrokerError):
        _finish(self, timeout)


def _done_with_what_waits(self: Any, part: Any, offset: int, due_ms: int) -> None:
    _hold(self, part, offset, due_ms)
    part.next = offset + 1


def _without_metadata(topic: str, partition: int, offset: int = OFFSET_INVALID, **options: Any) -> TopicPartition:
    return TopicPartition(topic, partition, offset)


def _checks_ids_first(self: Any, most: int) -> Any:
    check, begin = self._topic_check, self._topic_check.begin
    begin(self.partitions.values())
    check.begin = lambda partitions: None
    try:
        return _read(self, most)
    finally:
        check.begin = begin


def _sends_before_the_check(self: Any, outbox: Any) -> None:
    if outbox:
        effect(REPUBLISH_PRODUCE, lambda: outbox.send(self._producer))
    with suppress(TopicReplaced):
        self._input.check()


def _end_is_the_end(self: Any, message: Any, error: Any) -> None:
    part = self.partitions.get((message.topic(), message.partition()))
    if part and error.code() == KafkaError._PARTITION_EOF:
        part.next = max(part.next or 0, message.offset())
    else:
        _raise_for(self, message, error)


_read = original(reading.Input, "read")
_raise_for = original(reading.Input, "raise_for")
_hold = original(reading.Input, "hold")
_finish = original(worker.Worker, "finish")
_write = original(HopWriter, "write")
_passed_on = original(Express, "passed_on")
_advancing = original(Columns, "advancing")


def _hop(**changes: Any) -> Any:
    return lambda *arguments, **options: _write(*arguments, **{**options, **changes})


def _hop_counted(self: Any, *arguments: Any, index: int = 0, count: int = 1, **options: Any) -> bytes:
    self.numbered = getattr(self, "numbered", -1) + 1
    written: bytes = _write(self, *arguments, index=self.numbered, count=self.numbered + 1, **options)
    return written


def _express_forgets_the_hop(self: Any, given: Any, writers: Any) -> Any:
    made = _passed_on(self, given, writers)
    return given.of(np.isin(given.rows, made.rows))


def _advances_too_far(self: Any, source: Any) -> Any:
    before = {place: part.next for place, part in source.partitions.items()}
    made = _advancing(self, source)
    for place, part in source.partitions.items():
        part.next += part.next != before[place]
    return made


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "starts-at-the-end": (
        "partitions that no manifest knows start at their end",
        [(driver, "plan", _from_the_end)],
    ),
    "group-trusted": (
        "a run starts from the group's offsets, committed before the states are written",
        [(_Driver, "__init__", _from_the_group), (_Driver, "batch", _offsets_first)],
    ),
    "failed-batch-skipped": (
        "the engine goes on behind a batch that failed",
        [(_Driver, "batch", _skips_a_failed_batch)],
    ),
    "service-commits-first": (
        "a republisher commits before its outputs are acknowledged",
        [(loop.Loop, "_commit", _commits_first)],
    ),
    "service-does-not-flush": (
        "a republisher commits what is still in its producer's queue",
        [(worker.Worker, "finish", _no_flush)],
    ),
    "service-forgets-letters": ("a republisher produces no dead letters", [(worker.Worker, "finish", _no_letters)]),
    "service-ignores-failures": (
        "a republisher commits although the flush failed",
        [(worker.Worker, "finish", _swallows)],
    ),
    "service-leaves-gaps": (
        "a republisher's producer leaves out what fails and goes on behind it",
        [(producer, "_EXACT", {**producer._EXACT, "enable.gapless.guarantee": False})],
    ),
    "service-starts-at-the-end": (
        "a republisher begins new partitions at their end",
        [(reading, "OFFSET_BEGINNING", OFFSET_END)],
    ),
    "service-commits-no-topic-id": (
        "a republisher does not say which topic an offset counts in",
        [(reading, "TopicPartition", _without_metadata)],
    ),
    "service-checks-ids-first": (
        "a republisher asks which topics it reads before it reads",
        [(reading.Input, "read", _checks_ids_first)],
    ),
    "service-passes-retry-headers-on": (
        "a republisher passes on how often an input was tried",
        [(processor, "_plain", list)],
    ),
    "service-reads-ends-past-what-waits": (
        "the end of a partition counts as reached behind a record that waits for its next try",
        [(reading.Input, "raise_for", _end_is_the_end)],
    ),
    "service-done-with-what-waits": (
        "a republisher counts a record that waits for its next try as done",
        [(reading.Input, "hold", _done_with_what_waits)],
    ),
    "service-believes-old-offsets": (
        "a republisher goes on in a topic that was created again where it was in the old one",
        [(reading, "is_of_another_topic", lambda *_: False)],
    ),
    "service-follows-any-topic": (
        "a republisher reads on in a topic that was created again",
        [(TopicCheck, "finish", lambda self, partitions: {})],
    ),
    "service-sends-before-the-check": (
        "a republisher sends what it made of records before it knows which topic they came from, and goes on",
        [(worker.Worker, "_send", _sends_before_the_check)],
    ),
    "service-hides-rekeying": (
        "a republisher does not say that it changed the key",
        [(HopWriter, "write", _hop(rekeyed=False))],
    ),
    "service-counts-on": ("a republisher numbers its outputs on and on", [(HopWriter, "write", _hop_counted)]),
    "service-numbers-nothing": (
        "a republisher does not number its outputs",
        [(HopWriter, "write", _hop(index=0, count=1))],
    ),
    "service-counts-retries": (
        "a republisher's processor through its retry topic is a hop like any other",
        [(HopWriter, "write", _hop(pass_through=False))],
    ),
    "service-leaves-no-hop": (
        "a republisher passes a record on without a hop of its own",
        [(Express, "passed_on", _express_forgets_the_hop)],
    ),
    "service-advances-too-far": (
        "a republisher that forwards many records at once advances one offset too far",
        [(Columns, "advancing", _advances_too_far)],
    ),
}

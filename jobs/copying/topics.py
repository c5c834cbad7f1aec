"""The records of topics, of the same or another cluster, as the source of a copy."""

import logging
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

import envelope
from envelope import EnvelopeError, HopWriter, Lineage
from envelope.deadletter import DeadLetterHeaders, dead_letter_record
from jobs.copying.source import Output, Position, Read, Task, changed
from jobs.environment import UsageError
from jobs.republish.absence import Unsafe
from jobs.republish.offsets import check_lost, lost_ends
from jobs.republish.partition import Consumed
from jobs.republish.processor import NotOurs, Processor
from jobs.republish.record import InputRecord, identity
from jobs.republish.source import InputTopics
from jobs.republish.worker import now_ms
from persistence.compaction import COMPACTED_SOURCE, compaction
from persistence.kafka import BrokerRefused, BrokerUnavailable, KafkaSettings, Topics
from persistence.kafka.errors import broker_error, connection_trouble, passes
from persistence.kafka.facts import BEYOND_END
from persistence.kafka.headers import headers_of
from persistence.kafka.reading import READ_AHEAD, assign

_LOG = logging.getLogger("headwater.copy")
_WAIT_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 10.0  # between two looks at the number of partitions while nothing arrives
_PATIENCE_SECONDS: Final = 300.0


class TopicRecords:
    """The records of topics, each with one more hop in its chain. Keys, headers and payloads are not changed.

    Added partitions are read when the old ones are read up to their ends at the time when the copy sees the new ones.

    Args:
        topics: Topic name (of envelopes), several, or `InputTopics`.
        settings: Settings of the cluster that is read; None for the one of the target.
        cluster: Name of that cluster, if it is another one: part of every message's chain, do not change it.
        accept: Names of accepted risks: `beyond-end`, `compacted-source`.

    Raises:
        UsageError: Another cluster without a name, or a risk that does not exist.
    """

    kind = "topics"

    def __init__(
        self,
        topics: str | Sequence[str] | InputTopics,
        settings: KafkaSettings | None = None,
        *,
        cluster: str = "",
        accept: Collection[str] = (),
    ) -> None:
        if isinstance(topics, InputTopics):
            self._source = topics
        else:
            self._source = InputTopics((topics,) if isinstance(topics, str) else tuple(topics))
        if settings is not None and not cluster:
            raise UsageError("a copy from another cluster needs the name of that cluster (cluster=)")
        if unknown := sorted({*accept} - {BEYOND_END, COMPACTED_SOURCE}):
            raise UsageError(f"unknown risk {', '.join(unknown)}; choose from {COMPACTED_SOURCE}, {BEYOND_END}")
        self._settings = settings
        self._cluster = cluster
        self._accept = accept
        self._connection = ""
        self._looked = 0.0
        self._ids: dict[str, str] = {}
        self._next: dict[tuple[str, int], int] = {}
        self._epochs: dict[tuple[str, int], int | None] = {}
        self._hops: dict[tuple[str, int], HopWriter] = {}
        self._ends: dict[tuple[str, int], int] | None = None
        self._waiting: dict[str, tuple[int, dict[tuple[str, int], int]]] = {}
        self._expired = 0
        self._active = time.monotonic()

    def reads(self, target: str) -> bool:
        return self._settings is None and target in self._source.topics

    def open(self, task: Task, position: Position | None) -> None:
        names, settings = self._source.topics, self._settings or task.settings
        self._task = task
        self._topics = Topics(settings)
        self._topics.check()
        self._topics.check_rights(read=names)
        for finding in compaction(self._topics.cleanup_policies(names)):
            if finding.unsafe and finding.risk not in self._accept:
                raise Unsafe(finding.what, f"{finding.remedy} (--accept {finding.risk})")
            _LOG.warning("%s", finding)
        # `identity` has one output for each record, so the dead-letter topic is the only other one.
        self._processor = Processor(
            identity, via=task.name, source=self._source, targets={task.target: task.most_bytes}, target_cluster=""
        )
        self._express = self._processor.express()
        self._begin(position)
        config = settings.client(
            on_error=self._on_error,
            group_id=f"headwater.copy.{uuid.uuid4().hex}",
            **READ_AHEAD,
        )
        config |= {
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
        try:
            self._consumer = Consumer(config)
        except KafkaException as error:
            raise broker_error(error.args[0], "setting up the consumer") from error
        self._read_from(list(self._next))

    def _begin(self, position: Position | None) -> None:
        """Take the offsets to begin at."""
        facts, marks = self._topics.describe(self._source.topics), self._topics.marks(self._source.topics)
        saved: Mapping[str, Any] = (position or {}).get("topics", {})
        for name, fact in facts.items():
            self._ids[name] = fact.topic_id
            before = saved.get(name)
            if before is not None and before["id"] != fact.topic_id:
                raise changed(f"topic {name} was created again since it was copied")
            offsets = {int(one): at for one, at in before["offsets"].items()} if before else {}
            epochs = {int(one): at for one, at in before.get("epochs", {}).items()} if before else {}
            self._epochs |= {(name, one): at for one, at in epochs.items()}
            read = {envelope.TopicPartition(name, one): (at, epochs.get(one)) for one, at in offsets.items()}
            lost = lost_ends(self._topics, read, marks)
            check_lost(lost, read, self._accept, "copied")
            offsets |= {place.partition: end for place, end in lost.items()}
            for partition in range(fact.partitions):
                low = marks[envelope.TopicPartition(name, partition)].low
                if offsets and partition not in offsets:
                    continue
                self._add_above(name, partition, offsets.get(partition, low), low)
            if offsets and len(offsets) < fact.partitions:
                self._wait_for(name, fact.partitions)
        if self._task.until_caught_up:
            self._ends = {place: mark.high for place, mark in marks.items()}

    def _add_above(self, topic: str, partition: int, offset: int, low: int) -> None:
        """Read a partition from an offset on, or from the beginning of its log if this is later."""
        self._add(topic, partition, max(offset, low))
        if (lost := low - offset) > 0:
            self._expired += lost
            _LOG.warning("%s:%d: retention deleted %d offsets before they were copied", topic, partition, lost)

    def _add(self, topic: str, partition: int, offset: int) -> None:
        self._next[topic, partition] = offset
        self._hops[topic, partition] = HopWriter(
            topic, partition, self._task.name, topic_id=self._ids[topic], cluster=self._cluster
        )

    def read(self, most: int) -> Read:
        read = Read()
        read.counts.expired, self._expired = self._expired, 0
        got = cast(list[Consumed], self._consumer.consume(most, _WAIT_SECONDS))
        values = self._express.each(got, self._hops) if self._express else repeat(None)
        for message, value in zip(got, values, strict=False):
            if error := message.error():
                self._raise_for(message, error)
                continue
            self._take(message, value, read)
        if read.counts.read or (not got and self._waiting):
            self._active = time.monotonic()
        elif self._task.until_caught_up and time.monotonic() - self._active > _PATIENCE_SECONDS:
            hint = f" ({self._connection})" if self._connection else ""
            raise BrokerUnavailable(
                f"no record of {', '.join(self._source.topics)} arrived for {_PATIENCE_SECONDS:g} s, before the end{hint}",
                "Check that the broker runs and that the bootstrap address is right",
            )
        self._release()
        return read

    def _take(self, message: Consumed, value: bytes | None, read: Read) -> None:
        """Process a message.

        Args:
            message: The message.
            value: What the fast path made of it; None if it takes the normal path.
            read: Gets the result.
        """
        place = message.topic(), message.partition()
        offset, counts = message.offset(), read.counts
        if offset < self._next[place]:
            raise BrokerRefused(
                f"{place[0]}:{place[1]}: the position went back from {self._next[place]} to {offset}: the log lost its end",
                "Start the copy again: it says where, and how to go on",
            )
        self._next[place], self._epochs[place] = offset + 1, message.leader_epoch()
        counts.read += 1
        if value:
            read.outputs.append(Output(value, message.key()))
            counts.written += 1
            return
        kind, timestamp = message.timestamp()
        record = InputRecord(
            *(*place, offset, message.key(), message.value(), headers_of(message), timestamp if kind else None),
            leader_epoch=message.leader_epoch(),
            topic_id=self._ids[place[0]],
            cluster=self._cluster,
        )
        if self._processor.skips(record):
            counts.tombstones += 1
            return
        try:
            made_ones = self._processor.process(record, self._hops[place])
        except NotOurs:
            counts.copies += 1
        except EnvelopeError as error:
            read.outputs.append(self._dead(record, error))
            counts.dead_lettered[error.reason.value] += 1
        else:
            read.outputs += (Output(one.value, one.key, one.headers) for one in made_ones)
            counts.written += len(made_ones)

    def _dead(self, record: InputRecord, error: EnvelopeError) -> Output:
        if self._task.dead_letter is None:
            raise BrokerRefused(
                f"{record.node} cannot be copied ({error})",
                "Name a dead-letter topic, set the format of the topic (--input), or fix the producer",
            )
        letter = DeadLetterHeaders(
            record.topic,
            record.partition,
            record.offset,
            error.reason,
            topic_id=record.topic_id,
            lineage=str(Lineage((record.node,))),
            application=self._task.name,
            form=self._processor.form(record.topic),
            time_ms=now_ms(),
            detail=error.detail,
            leader_epoch=record.leader_epoch,
        )
        dead = dead_letter_record(letter, record.key, record.value, record.headers, self._task.dead_letter)
        return Output(dead.value, dead.key, dead.headers, dead=True)

    def _raise_for(self, message: Consumed, error: KafkaError) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            place = message.topic(), message.partition()
            # Transaction markers and compacted records occupy offsets without a record.
            self._next[place] = max(self._next[place], message.offset())
            return
        if passes(error):
            return
        problem = broker_error(error, f"reading {message.topic() or ', '.join(self._source.topics)}", self._connection)
        if isinstance(problem, BrokerRefused):
            raise problem
        _LOG.warning("%s", problem)

    def check(self) -> None:
        self._looked = time.monotonic()
        for name, fact in self._topics.describe(self._source.topics).items():
            if fact.topic_id != self._ids[name]:
                raise changed(f"topic {name} was created again while it was copied")
            known = sum(topic == name for topic, _ in self._next)
            if name not in self._waiting and fact.partitions > known:
                self._wait_for(name, fact.partitions)

    def _wait_for(self, name: str, partitions: int) -> None:
        """Read new partitions when the old ones are read up to their present ends."""
        _LOG.warning("%s has grown to %d partitions: the new ones follow when the old ones are read", name, partitions)
        ends = {place: end for place, end in self._topics.ends([name]).items() if tuple(place) in self._next}
        self._waiting[name] = partitions, cast(dict[tuple[str, int], int], ends)

    def _release(self) -> None:
        for name, (partitions, ends) in list(self._waiting.items()):
            if all(self._next[place] >= end for place, end in ends.items()):
                del self._waiting[name]
                new = [(name, one) for one in range(partitions) if (name, one) not in self._next]
                marks = self._topics.marks([name])
                for _, partition in new:  # nobody has read them: they begin at 0
                    self._add_above(name, partition, 0, marks[envelope.TopicPartition(name, partition)].low)
                self._read_from([*self._next])

    def _read_from(self, places: Sequence[tuple[str, int]]) -> None:
        assign(self._consumer, [TopicPartition(*place, self._next[place]) for place in places])

    @property
    def position(self) -> Position:
        topics: dict[str, Any] = {name: {"id": one, "offsets": {}} for name, one in self._ids.items()}
        for (name, partition), offset in sorted(self._next.items()):
            topics[name]["offsets"][str(partition)] = offset
            if (epoch := self._epochs.get((name, partition))) is not None:
                topics[name].setdefault("epochs", {})[str(partition)] = epoch
        return {"cluster": self._cluster, "topics": topics}

    @property
    def sequence(self) -> int | None:
        return None

    @property
    def caught_up(self) -> bool:
        ends = self._ends
        return ends is not None and all(self._next.get(place, 0) >= end for place, end in ends.items())

    def close(self) -> None:
        if hasattr(self, "_consumer"):
            self._consumer.close()

    def _on_error(self, error: KafkaError) -> None:
        self._connection = connection_trouble(error, self._connection)

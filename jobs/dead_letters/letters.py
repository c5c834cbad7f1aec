"""Reads a dead-letter topic, selects dead letters, and counts what was done with them."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from confluent_kafka import Consumer, TopicPartition

from envelope import Hop
from envelope.deadletter import DeadLetterHeaders
from envelope.errors import Reason
from envelope.headers import Headers
from envelope.redrive_notes import Notes
from jobs.environment import NotThereError
from persistence.kafka import BrokerUnavailable, KafkaSettings, Topics
from persistence.kafka.errors import broker_error, passes
from persistence.kafka.headers import headers_of
from persistence.kafka.reading import assign

_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects dead letters; an empty criterion does not restrict.

    Attributes:
        reasons: Reason codes.
        stages: Stages that rejected them.
        topics: Topics of the original records.
        applications: Flows and republishers that rejected them.
        unproven: Include dead letters of reason `unproven`; the caller asserts that they were never folded.
    """

    reasons: frozenset[str] = frozenset()
    stages: frozenset[str] = frozenset()
    topics: frozenset[str] = frozenset()
    applications: frozenset[str] = frozenset()
    unproven: bool = False

    def takes(self, letter: DeadLetterHeaders) -> bool:
        """Whether a dead letter is selected."""
        reason = letter.reason.value if letter.reason else ""
        if letter.reason is Reason.UNPROVEN and not self.unproven:
            return False
        pairs = (
            (self.reasons, reason),
            (self.stages, letter.stage),
            (self.topics, letter.topic),
            (self.applications, letter.application),
        )
        return all(not wanted or value in wanted for wanted, value in pairs)

    def check(self, letters: "Letters", *, stages: Collection[str] = (), topics: Collection[str] = ()) -> None:
        """Check that what it names exists: in one of the dead letters, or among what else is known.

        Args:
            letters: The dead letters. They are read only if something else is named than what is known.
            stages: Known stages.
            topics: Known topics.

        Raises:
            NotThereError: A stage, topic or application is not there. Nothing is refused if no dead letter is there and
                nothing is known.
            BrokerError: Kafka does not answer.
        """
        wanted = {
            "--stage": self.stages.difference(stages),
            "--topic": self.topics.difference(topics),
            "--application": self.applications,
        }
        if not any(wanted.values()):
            return
        found = {"--stage": {*stages}, "--topic": {*topics}, "--application": set[str]()}
        for facts in filter(None, (letter.facts for letter in letters)):
            found["--stage"].add(facts.stage)
            found["--topic"].add(facts.topic)
            found["--application"].add(facts.application)
        for option, names in wanted.items():
            if found[option] and (unknown := sorted(names - found[option])):
                known = ", ".join(sorted(filter(None, found[option])))
                remedy = f"choose from {known}" if known else "remove the option"
                raise NotThereError(f"{option} {unknown[0]}: no dead letter is of it; {remedy}")


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """One record of a dead-letter topic.

    Attributes:
        place: Its coordinates in the dead-letter topic.
        key: Key of the original record.
        value: Value of the original record, unless it was trimmed.
        headers: Headers of the original record, then those of the dead letter.
        facts: Facts from these headers; None when the record is not a dead letter.
    """

    place: Hop
    key: bytes | None
    value: bytes | None
    headers: Headers
    facts: DeadLetterHeaders | None


@dataclass(slots=True)
class Handled:
    """Counts of the records in a dead-letter topic, by what was done with them.

    Attributes:
        dead_letters: Dead letters read.
        done: Count by (topic, stage, reason) of the dead letters that were handled, or would be.
        left: Dead letters that were not selected.
        foreign: Records that are not dead letters.
        unusable: Count by reason of the dead letters that cannot be handled.
        before: How many of `done` had been redriven before, according to the notes.
    """

    dead_letters: int = 0
    done: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    left: int = 0
    foreign: int = 0
    unusable: Counter[str] = field(default_factory=Counter)
    before: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def add(self, letter: DeadLetterHeaders) -> None:
        """Count a dead letter as handled."""
        self.done[group_of(letter)] += 1


def group_of(letter: DeadLetterHeaders) -> tuple[str, str, str]:
    """Topic, stage and reason of a dead letter, under which it is counted."""
    return letter.topic, letter.stage, letter.reason.value if letter.reason else "unknown"


class Letters:
    """Everything that is in a dead-letter topic now, partition by partition.

    Args:
        settings: Settings of the Kafka cluster.
        topic: The dead-letter topic.

    Attributes:
        total: Upper bound of its number of records.
        notes: Which dead letters were redriven before; complete after everything was read. Notes are not dead letters.

    Raises:
        BrokerError: Kafka cannot be reached, has no such topic, or does not let this user read it.
    """

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        topics = Topics(settings)
        topics.check_rights(read=[topic])
        self._topic_id = topics.topic_ids([topic])[topic]
        self._marks = {partition: marks for (_, partition), marks in topics.marks([topic]).items()}
        self.notes = Notes()
        self.total = sum(marks.high - marks.low for marks in self._marks.values())

    def __iter__(self) -> Iterator[StoredDeadLetter]:
        consumer = Consumer(
            self._settings.client(group_id="headwater-letters", enable_auto_commit=False, enable_partition_eof=True)
        )
        try:
            for partition, marks in sorted(self._marks.items()):
                if marks.low < marks.high:
                    assign(consumer, [TopicPartition(self._topic, partition, marks.low)])
                    yield from self._partition(consumer, partition, marks.high)
        finally:
            consumer.close()

    def _partition(self, consumer: Consumer, partition: int, end: int) -> Iterator[StoredDeadLetter]:
        place = f"{self._topic}:{partition}"
        while True:
            message = consumer.poll(_SECONDS)
            if message is None:
                raise BrokerUnavailable(f"reading {place}: no answer", "Run the command again; that is safe")
            error = message.error()
            if error is not None:
                if error.name() == "_PARTITION_EOF":
                    return
                if passes(error):
                    continue
                raise broker_error(error, f"reading {place}")
            offset = message.offset()
            if offset is None or offset >= end:
                return
            headers = headers_of(message)
            if not self.notes.take(headers, message.value()):
                hop = Hop(self._topic, partition, offset, topic_id=self._topic_id)
                yield StoredDeadLetter(hop, message.key(), message.value(), headers, DeadLetterHeaders.read(headers))
            if offset + 1 >= end:
                return

"""Topics in memory, as `jobs.explaining` reads them, and a flow that is run on them message by message."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Hop
from envelope.deadletter import DeadLetterHeaders, Form, dead_letter_record
from envelope.redrive_notes import Notes, notes_of
from jobs.dead_letters.letters import StoredDeadLetter
from jobs.dead_letters.redrive import redriven
from jobs.explaining.explain import explained
from jobs.explaining.log import Log, Reader, Span
from jobs.explaining.outcome import Explanation
from jobs.tracing import Place

DEAD = "dead"


@dataclass
class InMemory(Reader):
    """Topics, a flow, its store in a file, and its dead-letter topic.

    Attributes:
        flow: The flow.
        directory: Directory of the store; None for one in memory.
        topics: Records by topic and partition; an offset is an index, None where nothing is stored.
        low: First offset by topic and partition, if it is not 0.
        ids: Id by topic.
    """

    flow: Flow[Any]
    directory: Path | None = None
    topics: dict[str, dict[int, list[Record | None]]] = field(default_factory=dict)
    low: dict[tuple[str, int], int] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    dead: list[tuple[DeadLetterHeaders, StoredDeadLetter]] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    read: dict[tuple[str, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name = uuid.uuid4().hex
        file = f"sqlite:///{self.directory}/{name}.db?synchronous=off"
        self.stores = bind(self.flow, {}, f"memory://{name}" if self.directory is None else file)
        for topic in self.flow.topics:
            self.topics.setdefault(topic, {0: []})
            self.ids.setdefault(topic, f"id-{topic}")

    def send(
        self, key: bytes | None, value: bytes | None, *, topic: str = "", partition: int = 0, timestamp_ms: int = 0
    ) -> Place:
        """Append a record."""
        name = topic or next(iter(self.flow.topics))
        records = self.topics[name].setdefault(partition, [])
        place = Place(name, partition, len(records))
        records.append(Record(name, partition, len(records), key, value, timestamp_ms, topic_id=self.ids[name]))
        return place

    def run(self, **options: Any) -> MemoryRunner:
        """Fold everything that was not read yet, one batch per record or in batches of `size`."""
        size = options.pop("size", 1_000_000)
        runner = MemoryRunner(self.flow, self.stores, topic_ids=self.ids, **options)
        unread = [
            record
            for topic, partitions in self.topics.items()
            for partition, records in sorted(partitions.items())
            for record in records[self.read.get((topic, partition), 0) :]
            if record is not None
        ]
        for at in range(0, len(unread), size):
            runner.process(unread[at : at + size])
        self.read = {(t, p): len(records) for t, parts in self.topics.items() for p, records in parts.items()}
        for died in runner.dead_letters:
            self._reject(died)
        runner.close()
        return runner

    def _reject(self, died: Any) -> None:
        record, place = died.record, len(self.dead)
        facts = DeadLetterHeaders(
            record.topic,
            record.partition,
            record.offset,
            died.reason,
            topic_id=record.topic_id,
            stage=died.stage,
            application=self.flow.name,
            time_ms=1_000,
            hole=died.hole,
            items=died.items,
            form=Form.ENVELOPE if self.flow.source_of(record.topic).envelope else Form.PAYLOAD,
            detail=died.detail,
            timestamp_ms=record.timestamp_ms,
        )
        made = dead_letter_record(facts, record.key, record.value, record.headers, 1_000_000)
        stored = StoredDeadLetter(Hop(DEAD, 0, place, topic_id="D"), made.key, made.value, made.headers, facts)
        self.dead.append((facts, stored))

    def redrive(self, number: int, *, noted: bool = True) -> Place:
        """Append the redriven record of a dead letter."""
        facts, letter = self.dead[number]
        value = redriven(letter.key, letter.value, letter.headers, facts, letter.place)
        for note in notes_of([(0, number)]) if noted else ():
            self.notes.take(note.headers, note.value)
        return self.send(letter.key, value, topic=facts.topic, partition=facts.partition)

    def explain(self, place: Place, **options: Any) -> Explanation:
        """What `explain` says about a record, with the dead-letter topic."""
        return explained(self.flow, place, self, self.stores, **{"dead_letters": DEAD, **options})

    def expire(self, place: Place) -> None:
        """Delete every record of a partition up to this one."""
        self.low[place.topic, place.partition] = place.offset + 1

    def log(self, topic: str) -> Log:
        parts = self.topics[topic]
        ends = {partition: len(records) for partition, records in parts.items()}
        low = {partition: self.low.get((topic, partition), 0) for partition in parts}
        return Log(topic, self.ids[topic], low, ends, dict(ends))

    def offsets_at(self, topic: str, time_ms: int) -> dict[int, int]:
        return {
            partition: next((at for at, one in enumerate(records) if one and one.timestamp_ms >= time_ms), len(records))
            for partition, records in self.topics[topic].items()
        }

    def letters(self, topic: str) -> Any:
        assert topic == DEAD
        return _Letters([letter for _, letter in self.dead], self.notes)

    def topic_ids(self, known: Mapping[str, str]) -> Mapping[str, str]:
        return known

    def record(self, place: Place) -> Record | None:
        return next(self.records(Span(place.topic, place.partition, place.offset, place.offset + 1)), None)

    def records(self, span: Span) -> Iterator[Record]:
        first = max(span.first, self.low.get((span.topic, span.partition), 0))
        yield from filter(None, self.topics[span.topic][span.partition][first : span.last])

    def recreate(self, topic: str) -> None:
        """Delete a topic and create it again."""
        self.topics[topic], self.ids[topic] = {0: []}, f"{self.ids[topic]}'"


@dataclass
class _Letters:
    letters: Sequence[StoredDeadLetter]
    notes: Notes

    @property
    def total(self) -> int:
        return len(self.letters)

    def __iter__(self) -> Iterator[StoredDeadLetter]:
        return iter(self.letters)

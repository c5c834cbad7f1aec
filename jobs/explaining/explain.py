"""Explains what a flow made of a record: where it is folded, or why it is not.

The record is read again, the flow's steps are run on it in memory to find the keys of its states, and the histories of
these states are asked for its position. Nothing is folded, published or written, and no epoch is taken.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.per_message.times import Times
from aggregations.run.border import check_whole
from aggregations.run.common import common
from aggregations.run.live import ref_of
from aggregations.run.run import Run
from envelope import Node, Reason, Standing
from envelope.deadletter import PREFIX, own_headers
from jobs.dead_letters.letters import StoredDeadLetter
from jobs.environment import NotThereError
from jobs.explaining.copies import Events, Near, Read, around
from jobs.explaining.elements import Elements
from jobs.explaining.evidence import DeadLetters, Evidence, Progress, is_listed
from jobs.explaining.filters import Judged, has_filters, judged_again, times_of
from jobs.explaining.find import find_records
from jobs.explaining.journal import Journaled, journaled
from jobs.explaining.log import Log, Reader, Span
from jobs.explaining.outcome import AtStage, Explanation, Fate, Letter, Outcome, taken_by, whole
from jobs.tracing import NOT_THERE, Found, Place
from persistence.kafka import KafkaSettings
from persistence.registry import open_stores
from persistence.times import Committed

SEARCH: Final = 10_000
"""Offsets before and after a record among which copies are searched: more than a republisher reads between commits."""

MOST: Final = 20
"""Records that are explained, if more have an event id or were made of a record."""


def explain(
    flow: Flow[Any],
    record: Place | str,
    *,
    kafka: KafkaSettings,
    stores: Mapping[str, str],
    dead_letters: str | None = None,
    journal: str | None = None,
    generation: int | None = None,
    search: int = SEARCH,
    ranges: Sequence[str] = (),
    limit: int = MOST,
    progress: Progress | None = None,
) -> list[Explanation]:
    """Explain what a flow made of a record.

    An active run is not disturbed; while it is committing a batch, the states of that batch may be newer than its
    manifest.

    Args:
        flow: The flow, with the definition that read the record.
        record: Coordinates of a record in a topic that the flow reads. Or coordinates in another topic, or an event id:
            then the records that were made of it, or have this id, are searched and explained.
        kafka: Settings of the Kafka cluster.
        stores: URL of the store by stage name, from `bind`.
        dead_letters: The flow's dead-letter topic, which is read whole; None if it has none.
        journal: The flow's journal; None if it has none.
        generation: Generation of the states; None for the live one.
        search: Number of offsets before a record, and after it, among which other records of its event are searched.
        ranges: Where records are searched; see `jobs.explaining.ranges.spans_of`.
        limit: Number of records that are explained, if more are found.
        progress: Called with the number of offsets or dead letters read, and their total.

    Returns:
        One explanation for a record of the flow's topics; otherwise one for each record that was found.

    Raises:
        NotThereError: No record has these coordinates, or the topics do not have a range.
        UsageError: A range is malformed.
        RunRefusedError: The flow has tables.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or a state is damaged.
    """
    if flow.tables:
        raise RunRefusedError(
            f"flow {flow.name}: explain does not follow records through lookup(): which row a record found is not known any "
            "more. inspect shows the states, trace the records, and audit compares both"
        )
    with closing(Reader(kafka)) as reader:
        if isinstance(record, Place) and record.topic in flow.topics:
            places = [record]
        else:
            places = find_records(flow, record, reader, ranges, progress)
        return [
            explained(
                flow,
                place,
                reader,
                stores,
                dead_letters=dead_letters,
                journal=journal,
                generation=generation,
                search=search,
                progress=progress,
            )
            for place in places[:limit]
        ]


def explained(
    flow: Flow[Any],
    place: Place,
    reader: Reader,
    stores: Mapping[str, str],
    *,
    dead_letters: str | None = None,
    journal: str | None = None,
    generation: int | None = None,
    search: int = SEARCH,
    progress: Progress | None = None,
) -> Explanation:
    """The explanation of one record of the flow's topics.

    Args: see `explain`, and

        reader: Reads the topics.
    """
    log = reader.log(place.topic)
    found = log.found(place)
    record = reader.record(place) if found is Found.FOUND else None
    if found is Found.BEYOND or (found is Found.FOUND and record is None):
        raise NotThereError(f"{place}: {NOT_THERE[Found.MISSING if found is Found.FOUND else found]}")
    with _opened(flow, stores, generation) as run:
        ids = {topic: reader.log(topic).topic_id for topic in flow.topics}
        reader.logs = run.logs(ids)
        case = Case(flow, run, place, ids, reader.topic_ids({**run.topic_ids, **ids}), reader.own_id(place))
        if (early := case.unread(found)) is not None:
            return early if record is None else replace(early, **_facts(record, case.events.of(record)))
        by_flow, dead = (flow.name, run.ref.generation), DeadLetters()
        if record is None and dead_letters is not None:
            dead = DeadLetters.read(reader.letters(dead_letters), run.ledger, {place}, reader.own_id, progress)
            record = next(filter(None, map(rejected_record, dead.by_place.get(place, ()))), None)
        read = None if record is None else case.events.of(record)
        near, spans = Near(), list[Span]()
        if record is not None and read is not None and search:
            spans = around(reader, record, search)
            near = case.events.near(record, read, chain.from_iterable(map(reader.records, spans)))
        if dead_letters is not None and not dead.by_place:
            places = {place, *(copy.place for copy in near.copies)}
            dead = DeadLetters.read(reader.letters(dead_letters), run.ledger, places, reader.own_id, progress)
        noted = None
        if journal is not None:
            noted = journaled(reader, journal, by_flow, place, ids[place.topic], run.given_up, reader.branch(place))
            if noted is not None and read is not None:
                noted = replace(noted, root=read.lineage.root)
        unlisted = "" if journal is None else "the journal has no entry of its batch"
        if noted is not None:
            unlisted = noted.left_out
        known = dead_letters is not None
        evidence = _evidence(case, read, near, dead, spans, known=known, log=log)
        filtered = dict[str, Judged]()
        before = Span(place.topic, place.partition, place.offset - evidence.searched, place.offset)
        if record is not None and has_filters(flow):
            records = chain(case.read(reader.records(before)), [record])
            filtered = judged_again(flow, case.roots, records, place, whole=evidence.is_whole)
        if record is not None and flow.is_timed:
            case.reached = times_of(flow, case.roots, case.read(reader.records(before)))
        case.evidence = replace(evidence, journaled=noted, unlisted=unlisted, filtered=filtered)
        return case.explained(record, read, found)


@dataclass(slots=True)
class Case:
    """One record, and what is known about it.

    Attributes:
        flow: The flow.
        run: Its stores and manifests, read-only.
        place: Coordinates of the record.
        topic_ids: Current id of each source.
        roots: Id by topic, for roots without a topic id.
        own_id: Topic id of the record.
        events: Finds the events of records.
        evidence: What the topics show.
        reached: The latest event times in the log of its partition before it.
    """

    flow: Flow[Any]
    run: Run
    place: Place
    topic_ids: Mapping[str, str]
    roots: Mapping[str, str]
    own_id: str
    events: Events = field(init=False)
    evidence: Evidence = field(default_factory=Evidence)
    reached: Times = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.events = Events(self.flow, self.roots)

    @property
    def start(self) -> int:
        """Offset of the partition at which the flow was given to begin."""
        return self._start_of(self.place.partition)

    def _start_of(self, partition: int) -> int:
        manifest = self.run.manifest
        given = manifest.starting_offsets.get(self.place.topic, {}) if manifest else {}
        return given.get(partition, 0)

    def reaches(self, span: Span | None, log: Log, partition: int) -> bool:
        """Whether a range has everything that the flow has read of a partition, up to the record in its own."""
        start, end = self._start_of(partition), self.run.positions(self.place.topic).get(partition, 0)
        if partition == self.place.partition:
            end = self.place.offset
        is_within = span is not None and max(span.first, log.low[partition]) <= start and end <= span.last
        return start >= end or is_within

    def read(self, records: Iterable[Record]) -> Iterator[Record]:
        """Those of some records of the partition that the flow did not skip at its start."""
        return (record for record in records if record.offset >= self.start)

    @property
    def times(self) -> tuple[Committed, ...]:
        """When batches were committed."""
        found = [manifest.times for _, manifest in self.run.manifests if manifest is not None]
        return max(found, key=lambda times: times[-1:], default=())

    def unread(self, found: Found) -> Explanation | None:
        """The explanation of a record that the flow has not read; None if it has."""
        manifest, (topic, partition, offset) = (
            self.run.manifest,
            (self.place.topic, self.place.partition, self.place.offset),
        )
        if manifest is None:
            why = f"flow {self.flow.name}, generation {self.run.ref.generation}, has no manifest in its stores: it never ran, or with others"
            return Explanation(self.place, Outcome.NOT_READ, why)
        read_id = manifest.topic_ids.get(topic, "")
        again = bool(read_id) and read_id != self.topic_ids[topic]
        progress = self.run.positions(topic).get(partition)
        next_offset = 0 if again or progress is None else progress
        if offset < next_offset:
            if offset >= self.start:
                return None
            return Explanation(self.place, Outcome.SKIPPED, f"the flow began at offset {self.start} of this partition")
        if found is Found.EXPIRED:
            return Explanation(self.place, Outcome.EXPIRED, "retention deleted it before the flow read it")
        why = f"the flow reads offset {next_offset} of this partition next"
        if again:
            why = "the topic was created again, and the flow has read none of it"
        return Explanation(self.place, Outcome.NOT_READ, why)

    def explained(self, record: Record | None, read: Read | None, found: Found) -> Explanation:
        """The explanation of a record that the flow has read."""
        evidence = self.evidence
        if record is None:
            letters = self._letters((), None)
            if letters:
                why = "retention has deleted it since it became a dead letter, and the dead letter is trimmed"
                return Explanation(self.place, Outcome.DEAD_LETTER, why, letters=letters)
            if (noted := evidence.journaled) is not None and (dropped := self._dropped(noted)):
                why = "the journal lists it; retention has deleted the record since"
                return Explanation(self.place, Outcome.DROPPED, why, stages=dropped)
            why = "the flow has read it, and retention has deleted it since: its keys are not known any more"
            return Explanation(self.place, Outcome.EXPIRED, "; ".join(filter(None, (why, evidence.unlisted))))
        elements = Elements(self.flow, self.run, self.place, self.roots, evidence, self.reached)
        rows, outputs = elements.follow(record)
        letters = self._letters(rows, elements.standing)
        outcome, why = whole(rows, outputs, elements.report, read, has_letters=bool(letters))
        if found is Found.EXPIRED:
            why += "; retention has deleted the record since"
        return Explanation(
            self.place,
            outcome,
            why,
            taken_by=taken_by(rows, evidence.copies) if outcome is Outcome.DROPPED else None,
            stages=tuple(rows),
            letters=letters,
            copies=evidence.copies,
            outputs=outputs,
            **_facts(record, read),
        )

    def _dropped(self, noted: Journaled) -> tuple[AtStage, ...]:
        """The stages that dropped an element of the record, according to the journal."""
        found = ((stage.name, noted.verdict(stage.name)) for stage in self.flow.stages)
        return tuple(
            AtStage(stage, Outcome.DROPPED, "the journal lists it", verdict=verdict, batch=noted.batch)
            for stage, verdict in found
            if verdict is not None
        )

    def _letters(self, rows: Sequence[AtStage], standing: Standing | None) -> tuple[Letter, ...]:
        """The record's dead letters, with what became of each."""
        ledger, waits, found = self.run.ledger, any(row.waits for row in rows), []
        redriven = None if self.evidence.lineage is None else self.evidence.lineage.redriven
        for letter in self.evidence.letters:
            facts, place = letter.facts, Place(letter.place.topic, letter.place.partition, letter.place.offset)
            assert facts is not None
            own = Node(facts.topic, facts.partition, facts.offset, self.own_id, self.flow.cluster)
            was, back = self.evidence.redriven(letter)
            # Without its bytes nothing shows whether a hole is filled; beyond its limit the ledger lists nothing.
            unknown = not rows if facts.hole else bool(ledger.forgotten.get(facts.stage or self.flow.stage_names[0]))
            if waits or is_listed(ledger, own, standing, redriven):
                fate = Fate.SENT if was else Fate.WAITING
            elif was:
                fate = Fate.REDRIVEN
            elif unknown or facts.reason is Reason.WINDOW_CLOSED:
                fate = Fate.WAITING
            else:
                fate = Fate.DISCARDED if self.evidence.given_up else Fate.FILLED
            found.append(Letter(place, facts.stage, facts.reason, facts.detail, facts.time_ms, fate, back))
        return tuple(found)


def _evidence(
    case: Case, read: Read | None, near: Near, dead: DeadLetters, spans: Sequence[Span], *, known: bool, log: Log
) -> Evidence:
    place, copies = case.place, sorted(near.copies, key=lambda copy: (copy.place.partition, copy.place.offset))
    first = max(spans[0].first, log.low[place.partition]) if spans else place.offset
    whole = bool(spans) and first <= case.start
    # Without a chain its position is its offset.
    own = read is not None and not read.lineage.reduced().edges
    others = {span.partition: span for span in spans}
    complete = whole and (own or all(case.reaches(others.get(partition), log, partition) for partition in log.high))
    mine = [copy for copy in copies if copy.place.partition == place.partition]
    earlier = [copy for copy in mine if case.start <= copy.place.offset < place.offset]
    manifest = case.run.manifest
    found = Evidence(
        tuple(copies),
        tuple(earlier),
        None if read is None else read.lineage,
        dead.by_place.get(place, ()),
        dead,
        case.run.ledger,
        case.flow.stage_names,
        in_order=complete and len(mine) == len(copies) and not near.overtaken,
        in_one_batch=manifest is not None and manifest.epoch == manifest.batch == 1,
        is_whole=whole,
        is_complete=complete,
        searched=place.offset - first,
        times=case.times,
        has_letters=known,
    )
    later = [copy for copy in copies if copy not in earlier]
    to_the_end = bool(spans) and spans[0].last >= case.run.positions(place.topic).get(place.partition, 0)
    given_up = (
        to_the_end
        and bool(found.letters)
        and not later
        and not any(found.redriven(letter)[0] for letter in found.letters)
    )
    return replace(found, given_up=given_up)


def rejected_record(letter: StoredDeadLetter) -> Record | None:
    """The record that became a dead letter; None if the dead letter does not have all of it."""
    facts = letter.facts
    if facts is None or any(name == f"{PREFIX}trimmed" for name, _ in letter.headers):
        return None
    place, headers = (facts.topic, facts.partition, facts.offset), tuple(own_headers(letter.headers))
    stamp = -1 if facts.timestamp_ms is None else facts.timestamp_ms
    return Record(*place, letter.key, letter.value, stamp, headers, facts.topic_id)


def _facts(record: Record, read: Read | None) -> dict[str, Any]:
    return {
        "lineage": "" if read is None else str(read.lineage),
        "event_id": "" if read is None else read.event_id,
        "key": record.key,
        "timestamp_ms": record.timestamp_ms,
    }


@contextmanager
def _opened(flow: Flow[Any], urls: Mapping[str, str], generation: int | None) -> Iterator[Run]:
    """A flow's stores and manifests, read-only: also those of a flow whose start would be refused, unless they have a
    part of a snapshot.
    """
    with ExitStack() as stack:
        handles = open_stores(urls.values(), stack)
        opened = {name: handles[url] for name, url in urls.items()}
        ref = ref_of(flow, opened, generation)
        run = Run(flow, ref, opened, urls, 0, None)
        run.manifests = [(name, store.load_manifest(ref)) for name, store in run.distinct_stores()]
        check_whole(ref, run.manifests)
        run.advanced(common([manifest for _, manifest in run.manifests], ref))
        yield run

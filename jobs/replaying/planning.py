"""What a rebuild would read, and why it is refused."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as Part

from aggregations.engine.archived import archived, gaps
from aggregations.engine.clients import NEEDED
from aggregations.engine.held import HELD
from aggregations.engine.ranges import Range
from aggregations.errors import DefinitionChangedError, RunRefusedError
from aggregations.run.held_outputs import HELD_OUTPUTS
from aggregations.run.risks import Risk, unsafe
from envelope import TopicPartition
from jobs.replaying.generations import Generations
from jobs.replaying.results import Differences
from persistence.findings import Finding
from persistence.kafka import KafkaSettings, Topics
from persistence.kafka.reading import assign
from persistence.manifest import Manifest
from persistence.pointer import Pointer

_SAMPLE_RECORDS: Final = 20_000
_SAMPLE_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True)
class RebuildRange:
    """What a rebuild reads of one partition.

    Attributes:
        topic: The topic.
        partition: The partition.
        start: The first offset: where the flow began, or where the rebuild continues.
        end: The offset after the last: where the live generation is.
        deleted: Offsets at the start of the range, or before it, that retention has deleted. If the flow was not given a
            start, it began at the first offset of the log, which is not recorded; then all offsets below the log's
            first one count.
        archived: Number of records to read that are read from an archive.
    """

    topic: str
    partition: int
    start: int
    end: int
    deleted: int = 0
    archived: int = 0

    @property
    def first(self) -> int:
        """The first offset that is still there."""
        return self.start + self.deleted

    @property
    def records(self) -> int:
        """Number of offsets to read."""
        return max(self.end - self.first, 0)


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast records were read, without folding them.

    Attributes:
        records: Records of the range that were read.
        seconds: Time that it took, with the connection.
    """

    records: int
    seconds: float

    def seconds_for(self, records: int) -> float:
        """Time for so many records."""
        return records * self.seconds / self.records if self.records else 0.0


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a rebuild would do.

    Attributes:
        flow: Name of the flow.
        live: The live generation.
        generation: The generation that is rebuilt.
        begun: The rebuild has begun: the ranges are what is left.
        redefined: Stages whose definition differs from that of the live generation.
        ranges: What is read.
        keys: Number of states of the live generation, by stage.
        rate: How fast the beginning of the ranges was read; None if nothing was.
        pointer: The pointer, with the earlier changes.
        differences: The differences between the live generation and the rebuild as they are now, while the rebuild has
            not read the ranges; None if it has not begun.
        snapshot: File of the snapshot that the rebuild begins with; None for where the flow began.
        refused: Why a rebuild would be refused, as far as it is not accepted: what Kafka no longer has, and rows of tables.
    """

    flow: str
    live: int
    generation: int
    begun: bool
    redefined: Sequence[str]
    ranges: Sequence[RebuildRange]
    keys: Mapping[str, int]
    rate: Rate | None
    pointer: Pointer
    differences: Differences | None = None
    snapshot: str | None = None
    refused: Sequence[Finding] = ()

    @property
    def records(self) -> int:
        """Number of offsets to read."""
        return sum(one.records for one in self.ranges)

    @property
    def seconds(self) -> float | None:
        """The least time that the rebuild takes: that of reading alone, in seconds."""
        return None if self.rate is None else self.rate.seconds_for(self.records)

    def as_json(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {
            "flow": self.flow,
            "live": self.live,
            "generation": self.generation,
            "begun": self.begun,
            "redefined": list(self.redefined),
            "ranges": [{**asdict(one), "first": one.first, "records": one.records} for one in self.ranges],
            "records": self.records,
            "keys": dict(self.keys),
            "snapshot": self.snapshot,
            "refused": [{"risk": one.risk, "what": one.what, "remedy": one.remedy} for one in self.refused],
            "seconds": None if self.seconds is None else round(self.seconds, 1),
            "differences": None if self.differences is None else self.differences.as_json(),
            "changes": [msgspec.structs.asdict(one) for one in self.pointer.changes],
        }


def check_generations(found: Generations, live: int) -> None:
    """Check that the live generation can be rebuilt with this flow and these stores.

    Raises:
        RunRefusedError: The stores contain nothing of it, or only a part.
    """
    flow, ref = found.flow, found.ref(live)
    if taken := {HELD, HELD_OUTPUTS} & {*flow.stage_names}:
        raise RunRefusedError(f"flow {flow.name}: a rebuild needs the name of stage {min(taken)}: rename the stage")
    manifests = found.manifests(live)
    missing = [name for name, manifest in manifests if manifest is None]
    if len(missing) == len(manifests):
        raise RunRefusedError(
            f"{ref}: the stores contain nothing of it; if it ran with other stores, give --store; if it never ran, there is "
            "nothing to rebuild"
        )
    kept = {stage for _, manifest in manifests if manifest for stage in manifest.kept or manifest.definitions}
    lacking = {stage for _, manifest in manifests if manifest for stage in manifest.definitions} - kept
    if missing or lacking:
        what = f"the store of stage {missing[0]} has nothing of it" if missing else f"no store has stage {min(lacking)}"
        raise RunRefusedError(f"{ref}: {what}. A rebuild is in the stores of the live generation: give these (--store)")
    if any(manifest.restoring for _, manifest in manifests if manifest):
        raise RunRefusedError(f"{ref}: a snapshot is being restored. Repeat `headwater restore` first")


def live_of(found: Generations, pointer: Pointer, generation: int | None) -> int:
    """The live generation.

    Args:
        found: The generations.
        pointer: The pointer of the flow.
        generation: The one that the settings name, which counts if the stores have no pointer yet; None if they name none.

    Raises:
        RunRefusedError: The stores have a pointer, which names another one.
    """
    if not pointer.version:
        return generation or pointer.live
    if generation not in (None, pointer.live):
        raise RunRefusedError(
            f"{found.ref(generation)}: generation {pointer.live} is live. Remove `generation` from headwater.toml"
        )
    return pointer.live


def check_open(found: Generations, pointer: Pointer) -> None:
    """Check that no swap and no rollback is under way.

    Raises:
        RunRefusedError: One is, or was interrupted.
    """
    if pointer.closing:
        command = "--swap, or keep the live generation with --rollback" if pointer.rebuild else "--rollback"
        raise RunRefusedError(
            f"{found.ref(pointer.closing)}: it is being replaced, and the command was interrupted. Repeat {command}"
        )


def check_definition(found: Generations, pointer: Pointer, live: int, *, redefine: bool) -> Sequence[str]:
    """Check that the rebuild has the definition of the live generation, or is to change it.

    Returns:
        The stages whose definition has changed.

    Raises:
        DefinitionChangedError: Some have, and this was not announced.
    """
    redefined = stages_redefined(found, live)
    announced = redefine or (pointer.rebuild is not None and pointer.rebuild.redefined)
    if redefined and not announced:
        raise DefinitionChangedError(
            f"{found.ref(live)}: stage {redefined[0]} has another definition there. If the rebuild is to change it, give "
            "--redefine; otherwise use the code that made the live generation"
        )
    return redefined


def stages_redefined(found: Generations, generation: int) -> tuple[str, ...]:
    """Stages whose definition is not that of a generation: changed, added or removed ones."""
    made: dict[str, str] = {}
    for _, manifest in found.manifests(generation):
        made |= dict(manifest.definitions) if manifest else {}
    own = found.flow.definitions
    return tuple(name for name in dict.fromkeys([*own, *made]) if own.get(name) != made.get(name))


def ranges_of(
    found: Generations, until: int, generation: int | None, topics: Topics, begun: Manifest | None = None
) -> list[RebuildRange]:
    """What a generation has to read of each partition to have what another one has.

    Args:
        found: The generations.
        until: The other generation.
        generation: The generation; None for one that has not begun, which begins where the other one began.
        topics: Administrative access to topics.
        begun: Manifest of the snapshot that it begins with and does not have yet; None if there is none.

    Raises:
        RunRefusedError: A topic does not exist any more, or was created again.
        BrokerError: Kafka does not answer, or refuses a request.
    """
    live, rebuilt = found.manifest(until), begun
    if generation is not None and begun is None:
        rebuilt = found.manifest(generation)
    assert live is not None
    sources = [topic for topic in found.flow.topics if topic in live.positions]
    if missing := topics.missing(sources):
        raise RunRefusedError(f"flow {found.flow.name}: topic {missing[0]} does not exist: create it, or restore it")
    facts, marks, archive = topics.describe(sources), topics.marks(sources), archived(topics)
    ranges = []
    for topic in sources:
        known, now = live.topic_ids.get(topic, ""), facts[topic].topic_id
        if known and now and known != now:
            raise RunRefusedError(
                f"flow {found.flow.name}: topic {topic} was created again, and the live generation has not read it. Run it "
                "first, with --accept topic-recreated"
            )
        given, mine = live.starting_offsets.get(topic, {}), rebuilt.positions.get(topic, {}) if rebuilt else {}
        for partition, progress in sorted(live.positions[topic].items()):
            low = marks[TopicPartition(topic, partition)].low
            start = mine[partition].next_offset if partition in mine else given.get(partition, 0)
            deleted = max(min(low, progress.next_offset) - start, 0)
            place, end = TopicPartition(topic, partition), progress.next_offset
            stored = 0 if archive is None else archive.count(place, start + deleted, end)
            ranges.append(RebuildRange(topic, partition, start, end, deleted, stored))
    return ranges


def deleted_records(found: Generations, ranges: Sequence[RebuildRange], topics: Topics) -> list[Finding]:
    """Ranges of which Kafka, with its archive, no longer has everything."""
    left = [Range(one.partition, one.first, one.end, one.topic) for one in ranges]
    return [
        *(_deleted(found, one) for one in ranges if one.deleted),
        *gaps(found.flow.name, archived(topics), left),
    ]


def replaced_topics(found: Generations, live: int) -> list[Finding]:
    """Topics that were deleted and created again, and of which the live generation has events of before."""
    manifest = found.manifest(live)
    known = {} if manifest is None else manifest.incarnations
    return [_replaced(found, topic) for topic in found.flow.topics if len(known.get(topic, ())) > 1]


def newest_rows(found: Generations) -> list[Finding]:
    """Tables of which the states contain earlier rows than a rebuild finds, which reads them to their ends first."""
    return [
        unsafe(
            Risk.NEWEST_ROWS,
            f"flow {found.flow.name}: stages behind the lookup in table {table} have what each record found when it was read, "
            "and a rebuild finds the newest rows",
            "Mend chosen keys (--key, with --journal) to get the rows of then, or accept the newest ones",
        )
        for table in found.flow.tables
    ]


def topics_since(found: Generations, live: int, generation: int) -> list[Finding]:
    """Topics that were created again since another generation read them: it cannot get all that the live one has read.

    Nothing shows how far the live generation has read a topic that was deleted and created again.

    Args:
        found: The generations.
        live: The live generation.
        generation: The other one: a rebuild, or the generation before.
    """
    ids = [one.topic_ids if (one := found.manifest(number)) else {} for number in (generation, live)]
    newer = [topic for topic in found.flow.topics if len({known[topic] for known in ids if known.get(topic)}) > 1]
    return [_not_continued(found, generation, topic) for topic in newer]


def _not_continued(found: Generations, generation: int, topic: str) -> Finding:
    return unsafe(
        Risk.LOST_RECORDS,
        f"{found.ref(generation)}: topic {topic} was created again since it read the former one, and it would miss what the live "
        "generation has read of that since",
        "Keep the live generation, give up a rebuild with --abandon, or accept the loss",
    )


def _replaced(found: Generations, topic: str) -> Finding:
    return unsafe(
        Risk.LOST_RECORDS,
        f"flow {found.flow.name}: topic {topic} was created again, and the states contain events of the former topic, which "
        "a rebuild would miss",
        "Keep the live generation, or accept the loss",
    )


def _deleted(found: Generations, one: RebuildRange) -> Finding:
    return unsafe(
        Risk.LOST_RECORDS,
        f"flow {found.flow.name}: {one.topic}:{one.partition} has to be read from offset {one.start} on, but offsets {one.start} "
        f"to {one.first - 1} were deleted, and the states would miss them",
        "Read them from an archive (--history parquet:PATH), restore them from a copy of the topic, begin with a snapshot that "
        "was made later (--snapshot FILE), or accept the loss",
    )


def starts_of(ranges: Sequence[RebuildRange], topics: Topics) -> dict[str, dict[int, int]]:
    """Where a rebuild begins, by topic and partition of the ranges' topics."""
    starts: dict[str, dict[int, int]] = {}
    for one in ranges:
        starts.setdefault(one.topic, {})[one.partition] = one.first
    for (topic, partition), mark in topics.marks(list(starts)).items():
        starts[topic].setdefault(partition, mark.low)  # a partition that the live generation does not know yet
    return starts


def keys_of(found: Generations, live: int, progress: Callable[[int, int | None], Any]) -> dict[str, int]:
    """Number of states of the live generation by stage of the flow; stages that are new have none."""
    counts: dict[str, int] = {}
    done = 0
    for stage in found.flow.stages:
        counts[stage.name] = 0
        for _ in found.run.stores[stage.name].scan(found.ref(live).stage(stage.name)):
            counts[stage.name] += 1
            done += 1
            if done % 1000 == 0:
                progress(done, None)
    progress(done, None)
    return counts


def reading_rate(kafka: KafkaSettings, ranges: Sequence[RebuildRange]) -> Rate | None:
    """Read the beginning of the ranges, up to 20,000 records or 3 seconds; without what is in an archive."""
    wanted = [one for one in ranges if one.records and not one.archived]
    if not wanted:
        return None
    began, records, ended = time.monotonic(), 0, 0
    with closing(Consumer(kafka.client(group_id="headwater-replay") | NEEDED)) as consumer:
        assign(consumer, [Part(one.topic, one.partition, one.first) for one in wanted])
        left = min(sum(one.records for one in wanted), _SAMPLE_RECORDS)
        while records < left and ended < len(wanted) and (spent := time.monotonic() - began) < _SAMPLE_SECONDS:
            messages = consumer.consume(min(left - records, 5000), _SAMPLE_SECONDS - spent)
            errors = [error for message in messages if (error := message.error()) is not None]
            records += len(messages) - len(errors)
            ended += len(errors)  # each says, as a rule, that a partition ends
    return Rate(records, time.monotonic() - began) if records else None

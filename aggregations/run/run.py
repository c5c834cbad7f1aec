"""One run of a flow against its stores: its epoch, its progress, and the manifest after each batch."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from aggregations.definition.flow import Flow, Stage
from aggregations.definition.windows import START_BYTES, Window
from aggregations.per_message.ledger import Changes, Doubt, Entry, Ledger
from aggregations.per_message.times import latest
from aggregations.run.acknowledged import AcknowledgedWrites
from aggregations.run.growth import advance
from aggregations.run.incarnations import Incarnations, merge_incarnations
from envelope import TopicPartition
from persistence.commit.faults import EPOCH, FINISH, LEDGER, effect
from persistence.commit.order import store_order
from persistence.growth import METADATA_MAX_AGE_SECONDS, Ends
from persistence.manifest import GivenUp, Growth, Manifest, Progress, Rebuilt, unread, with_progress_of, written_anew
from persistence.marks import Bucket, KnownMarks
from persistence.protocol import FlowRef, StageRef, StateStore
from persistence.times import Committed, committed


@dataclass(slots=True)
class Run:
    """A run that holds the flow's epoch in all of its stores.

    Attributes:
        flow: The flow.
        ref: Its name and generation.
        stores: Open store by stage name.
        urls: URL by stage name.
        epoch: Epoch of this run.
        manifest: Progress; None for a flow that never ran. Partitions that it does not name start at their beginning.
        accept_definition: Continue states of any other definition if their shape fits.
        earlier: Earlier definitions by stage whose states are continued; see `Manifest.earlier`.
        accept_disorder: Read new partitions immediately although the order of published messages is lost.
        accept_eviction: Evict positions although partitions were added before the topic was read to its end.
        growths: The current growth of each consumed topic that grows, as of the current batch.
        manifests: (first stage of the store, its manifest), upstream first, as they were when the run began.
        ledger: Dead letters without a hole, from `manifest`.
        crashed: An earlier run did not end cleanly: it may have folded records that no manifest covers.
        doubt: Offset by topic and partition below which such a run may have folded records; see `doubted`.
        known: Marks that buckets have acknowledged to this run.
        acknowledged: These marks, and the manifests that stores have acknowledged to this run.
        times: When batches were committed; see `Manifest.times`.
        clock: Returns the time in seconds since 1970.
        rebuilt: Who rebuilt this generation; see `Manifest.rebuilt`.
        given_up: Batches that restores gave up; see `Manifest.given_up`.
        notes: Note every batch before it is folded; see `Manifest.noted`.
        unasked: See `Manifest.unasked`.
        emptied: Tables that this run has emptied because their topics were created again, each with the id of the topic.
    """

    flow: Flow[Any]
    ref: FlowRef
    stores: Mapping[str, StateStore]
    urls: Mapping[str, str]
    epoch: int
    manifest: Manifest | None
    accept_definition: bool = False
    earlier: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    accept_disorder: bool = False
    accept_eviction: bool = False
    growths: dict[str, Growth] = field(default_factory=dict)
    manifests: Sequence[tuple[str, Manifest | None]] = ()
    ledger: Ledger = field(init=False)
    crashed: bool = False
    doubt: Doubt = field(default_factory=dict)
    known: KnownMarks = field(init=False)
    acknowledged: AcknowledgedWrites = field(init=False)
    times: tuple[Committed, ...] = ()
    clock: Callable[[], float] = time.time
    rebuilt: Rebuilt | None = None
    given_up: tuple[GivenUp, ...] = ()
    notes: bool = False
    unasked: bool = False
    emptied: set[tuple[str, str]] = field(default_factory=set)
    _former: dict[str, Manifest] = field(default_factory=dict)
    """By topic that was created again: the manifest of the former one, until a batch of the new one is folded."""

    def __post_init__(self) -> None:
        stages = self.flow.stage_names
        self.known = KnownMarks(self.ref, stages)
        self.acknowledged = AcknowledgedWrites(self.ref, stages, self.known)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the consumed topics."""
        return tuple(self.flow.topics)

    @property
    def evicts(self) -> bool:
        """Whether histories evict positions beyond their limit: not while a consumed topic grows."""
        return not self.growths or self.accept_eviction

    @property
    def longest_keys(self) -> dict[str, int]:
        """Bytes of the longest key by stage, without the start of a window, if its store has a limit."""
        limits = [(one, self.stores[one.name].capabilities.max_key_bytes) for one in self.flow.stages]
        return {
            one.name: limit - (START_BYTES if isinstance(one.aggregate.window, Window) else 0)
            for one, limit in limits
            if limit is not None
        }

    def positions(self, topic: str) -> dict[int, int]:
        """Next offset by partition of a consumed topic, from the manifest."""
        found = self.manifest.positions.get(topic, {}) if self.manifest else {}
        return {partition: progress.next_offset for partition, progress in found.items()}

    def logs(self, topic_ids: Mapping[str, str]) -> dict[TopicPartition, Progress]:
        """Progress per partition of the topics that still have the ids in the manifest."""
        before = self.manifest
        return {
            TopicPartition(topic, partition): progress
            for topic, parts in (before.positions.items() if before is not None else ())
            if before is not None and topic in topic_ids and before.topic_ids.get(topic, "") == topic_ids[topic]
            for partition, progress in parts.items()
        }

    def note_epochs(self, epochs: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> None:
        """Note the epochs of partitions' leaders in every store, between two batches.

        Args:
            epochs: The epochs.
            ends: Where the records of the former epochs end. An earlier run that crashed may have folded later ones.
        """
        assert self.manifest is not None
        positions = {topic: dict(parts) for topic, parts in self.manifest.positions.items()}
        for place, epoch in epochs.items():
            old = positions[place.topic][place.partition]
            branches = (
                written_anew(old.branches, ends[place], epoch) if self.replays and place in ends else old.branches
            )
            positions[place.topic][place.partition] = msgspec.structs.replace(
                old, leader_epoch=epoch, branches=branches
            )
        self.note(self.changed(positions=positions))

    def look(
        self,
        topic: str,
        partitions: int,
        *,
        clock_ms: int,
        ends: Ends | None,
        shared: bool = False,
        max_age_seconds: float = METADATA_MAX_AGE_SECONDS,
    ) -> bool:
        """Note a consumed topic's number of partitions before a batch is folded; see `run.growth.advance`.

        Args:
            topic: The topic.
            partitions: Its number of partitions, queried after the batch was read.
            clock_ms: Current time in milliseconds since 1970.
            ends: Returns the ends of the topic.
            shared: A key arrived in two partitions.
            max_age_seconds: Seconds for which producers may not know of new partitions.

        Returns:
            Whether the growth has changed.
        """
        before, positions = self.growths.get(topic), self.positions(topic)
        growth = advance(
            before,
            known=len(positions),
            now=partitions,
            clock_ms=clock_ms,
            max_age_ms=round(max_age_seconds * 1000),
            positions=positions,
            ends=ends,
            shared=shared,
        )
        self._grows(topic, growth)
        if before is not None or growth is not None:
            self.ledger = self.ledger.levelled()
        return growth != before

    def _grows(self, topic: str, growth: Growth | None) -> None:
        self.growths.pop(topic, None)
        if growth is not None:
            self.growths[topic] = growth

    @property
    def start(self) -> dict[TopicPartition, int]:
        """Next offset per topic and partition."""
        positions = self.manifest.positions if self.manifest else {}
        return {
            TopicPartition(topic, partition): progress.next_offset
            for topic, parts in positions.items()
            for partition, progress in parts.items()
        }

    @property
    def batch(self) -> int:
        """Number of the next batch."""
        return 1 + (self.manifest.batch if self.manifest else 0)

    def stage_ref(self, stage: Stage) -> StageRef:
        """Identity of a stage's states."""
        return self.ref.stage(stage.name)

    def distinct_stores(self) -> list[tuple[str, StateStore]]:
        """Each store once, under the name of its first stage, upstream first."""
        first: dict[str, str] = {}
        for stage in self.flow.stage_names:
            first.setdefault(self.urls[stage], stage)
        return [
            (first[url], self.stores[first[url]]) for url in store_order(self.urls[s] for s in self.flow.stage_names)
        ]

    @property
    def topic_ids(self) -> dict[str, str]:
        """Current topic ids in the manifest: of consumed topics and of root topics."""
        if self.manifest is None:
            return {}
        return {**{topic: ids[-1] for topic, ids in self.manifest.incarnations.items()}, **self.manifest.topic_ids}

    def incarnations(self, current: Mapping[str, str]) -> Incarnations:
        """Topic ids known so far, and the current ones."""
        return Incarnations(self.manifest.incarnations if self.manifest else {}, current)

    def following(
        self,
        offsets: Mapping[TopicPartition, int],
        topic_ids: Mapping[str, str],
        incarnations: Mapping[str, tuple[str, ...]],
        changes: Changes | None = None,
    ) -> Manifest:
        """The manifest after a batch that ends at these next offsets is persisted, with its changes to the ledger.

        A manifest never goes back within an incarnation of a topic; a topic that was created again starts over.
        """
        before = self.manifest
        former = self.former_tables(topic_ids).values()  # they are emptied before the manifest names the new topics
        topic_ids = {topic: one for topic, one in topic_ids.items() if topic not in former}
        positions: dict[str, dict[int, Progress]] = {}
        if before is not None:
            for topic, partitions in before.positions.items():
                known = before.topic_ids.get(topic, "")
                if topic in self._former or topic_ids.get(topic, known) == known:
                    positions[topic] = dict(partitions)
        given = {topic: at for topic, at in (before.starting_offsets if before else {}).items() if topic in positions}
        changes = changes or Changes()
        for (topic, partition), offset in offsets.items():
            mine = positions.setdefault(topic, {})
            old = mine.get(partition, Progress(0))
            time_us = latest(old.time_us, changes.times.get(TopicPartition(topic, partition)))
            mine[partition] = msgspec.structs.replace(old, next_offset=max(offset, old.next_offset), time_us=time_us)
        return Manifest(
            epoch=self.epoch,
            batch=self.batch,
            positions=positions,
            topic_ids={**(before.topic_ids if before else {}), **topic_ids},
            # Even if a consumed topic is not a root topic, its ids must be in order of age.
            incarnations=merge_incarnations(incarnations, {topic: [one] for topic, one in topic_ids.items() if one}),
            **self.ledger.changed(changes.resolved()).fields(),
            growth=dict(self.growths),
            starting_offsets=given,
            closing_us=before.closing_us if before else None,
            published=before.published if before else {},
            unfinished=unread(before.unfinished, positions) if before else {},
        )

    def former_tables(self, topic_ids: Mapping[str, str]) -> dict[str, str]:
        """Topics that were created again, by table, as long as the tables have the rows of the former ones.

        Args:
            topic_ids: Current id of each consumed topic, if it is known.
        """
        known = self.manifest.topic_ids if self.manifest else {}
        return {
            name: topic
            for name, table in self.flow.tables.items()
            for topic in table.topics
            if (now := topic_ids.get(topic, "")) and known.get(topic, now) != now and (name, now) not in self.emptied
        }

    def homes(self) -> dict[str, str]:
        """Name of its store by stage: the name of the store's first stage."""
        names = {self.urls[name]: name for name, _ in self.distinct_stores()}
        return {stage: names[self.urls[stage]] for stage in self.flow.stage_names}

    def save_manifest(self, name: str, manifest: Manifest, *, commits: bool = True) -> None:
        """Write a manifest into the store of that name, with the stages that it keeps and the acknowledged marks.

        Args:
            name: Name of the store: its first stage.
            manifest: The manifest.
            commits: All writes acknowledged so far are below the manifest's offsets. Otherwise the marks of the
                previous manifest are kept: saves of a half-written batch may go back with a store, and are repeated.

        Raises:
            StoreWentBack: The manifest in the store is older than the last one that this run knows.
        """
        for topic, former in self._former.items():
            if manifest.topic_ids.get(topic) == former.topic_ids.get(topic):
                # Next to the former topic's id, offsets of the new topic would count as offsets of the former one.
                manifest = with_progress_of(manifest, former, topic)
        held = self.acknowledged
        marks = held.marks(name, commits=commits)
        self.times = committed(self.times, manifest.epoch, manifest.batch, round(self.clock() * 1000))
        marked = msgspec.structs.replace(self.of_store(name, manifest), marks=marks, since=held.since, times=self.times)
        self.stores[name].save_manifest(self.ref, marked, after=held.manifest(name))
        held.saved(name, manifest)

    def check_progress(self) -> None:
        """Check before a batch is folded that no store went back as a whole.

        Otherwise the batch would save marks upstream that the store no longer holds, and the next start would be
        refused, although a replay would fill the store again.

        Raises:
            StoreWentBack: The manifest in a store is older than the one that this run saved.
        """
        for name, store in self.distinct_stores():
            self.acknowledged.check_manifest(name, store.load_manifest(self.ref))

    def of_store(self, name: str, manifest: Manifest) -> Manifest:
        """A manifest as the store of that name gets it: with the flow's definitions and the stages that it keeps."""
        kept = tuple(stage for stage, home in self.homes().items() if home == name)
        own = {"definitions": self.flow.definitions, "earlier": self.earlier, "rebuilt": self.rebuilt}
        seen = {"noted": self.notes, "unasked": self.unasked}
        return msgspec.structs.replace(manifest, kept=kept, given_up=self.given_up, **own, **seen)

    def earlier_of(self, stage: Stage) -> Collection[str] | None:
        """Earlier definitions of a stage whose states are continued; None for any."""
        return None if self.accept_definition else self.earlier.get(stage.name, ())

    def start_at(
        self,
        topic: str,
        topic_id: str,
        starts: Mapping[int, int],
        growth: Growth | None = None,
        starting_offsets: Mapping[int, int] | None = None,
        logs: Mapping[int, Progress] | None = None,
    ) -> None:
        """Start from these offsets of a topic, and write them into every store whose manifest differs.

        If records of a partition expire before its first record is read, the loss is then detected as for any other
        partition. A topic that was created again is not noted before a batch of it is folded.

        Args:
            topic: The topic.
            topic_id: Its current id.
            starts: Offset that is read first, by partition.
            growth: The current growth of the topic.
            starting_offsets: The offsets that the flow was given to begin at; None when it begins at the beginning of
                the log, or has begun before.
            logs: What is known of each partition's log: its leader epoch and its branches; None for what was noted.
        """
        before = self.manifest or Manifest(self.epoch, 0, **self.ledger.fields())
        self._grows(topic, growth)
        again = before.topic_ids.get(topic, topic_id) != topic_id
        read = {} if again else before.positions.get(topic, {})
        begun = {}
        for partition, offset in starts.items():
            old = read.get(partition, Progress(0))
            begun[partition] = msgspec.structs.replace(
                (logs or {}).get(partition, old), next_offset=offset, time_us=old.time_us
            )
        kept = {name: at for name, at in before.starting_offsets.items() if name in before.positions}
        left = {name: at for name, at in before.unfinished.items() if not (again and name == topic)}
        if again:
            kept.pop(topic, None)
        self.manifest = msgspec.structs.replace(
            before,
            positions={**before.positions, topic: begun},
            growth=dict(self.growths),
            starting_offsets={**kept, **({topic: starting_offsets} if starting_offsets else {})},
            unfinished=left,
        )
        if again:
            self._former.setdefault(topic, before)
            return
        if before.positions == self.manifest.positions and before.growth == self.manifest.growth:
            return
        named = {topic: topic_id} if topic_id else {}
        self.manifest = msgspec.structs.replace(
            self.manifest,
            epoch=self.epoch,
            topic_ids={**before.topic_ids, **named},
            incarnations=merge_incarnations(before.incarnations, {name: [one] for name, one in named.items()}),
        )
        self.save_everywhere(self.manifest)

    def begin_at(self, place: TopicPartition, offset: int) -> None:
        """Begin a partition at an offset, or go on there after an accepted gap. The caller notes it."""
        before = self.manifest or Manifest(self.epoch, 0, **self.ledger.fields())
        topic, partition = place
        positions = {**before.positions.get(topic, {}), partition: Progress(offset)}
        given = {**before.starting_offsets.get(topic, {}), partition: offset}
        self.manifest = msgspec.structs.replace(
            before,
            positions={**before.positions, topic: positions},
            starting_offsets={**before.starting_offsets, topic: given},
        )

    def note_growth(self) -> None:
        """Note a new growth in the manifests before anything of its batch is persisted.

        After a crash in a half-written batch, the replay may not see that a key was in two partitions.
        """
        assert self.manifest is not None
        if all(growth == self.manifest.growth.get(topic) for topic, growth in self.growths.items()):
            return
        self.note(self.noting())

    def noting(self) -> Manifest:
        """The manifest with the growth that was detected since, between two batches."""
        return self.changed(growth=dict(self.growths), **self.ledger.fields())

    def save_everywhere(self, manifest: Manifest, point: str = EPOCH, *, commits: bool = True) -> None:
        """Write a manifest outside of a commit, downstream store first; `commits` is as for `save_manifest`."""
        for name, _ in reversed(self.distinct_stores()):
            effect(point, lambda name=name: self.save_manifest(name, manifest, commits=commits))  # type: ignore[misc]

    def check_marks(self) -> None:
        """Read the marks of every bucket again, after the reports of tasks were lost, and use them as known marks.

        Raises:
            StoreWentBack: A bucket lost writes that it acknowledged to this run, or to a bucket upstream of it.
        """
        self.acknowledged.check_buckets(self.buckets(), epoch=self.epoch)

    def buckets(self) -> dict[str, Mapping[str, Bucket]]:
        """Every bucket of every stage whose store keeps marks."""
        return {
            stage.name: self.stores[stage.name].marks(self.stage_ref(stage))
            for stage in self.flow.stages
            if self.stores[stage.name].capabilities.marked
        }

    def advanced(self, manifest: Manifest | None) -> None:
        """Continue from a manifest that every store has."""
        self.manifest = manifest
        self.ledger = Ledger.of(self.ref.flow, self.ref.generation, manifest, self.rebuilt)

    @property
    def replays(self) -> bool:
        """Whether a crashed run may have folded records that this run has not committed yet."""
        start = self.start
        read = bool(self.doubt) and all(start.get(place, 0) >= end for place, end in self.doubt.items())
        return self.crashed and not read

    def doubted(self, ends: Mapping[TopicPartition, int]) -> None:
        """Treat all records below the partitions' ends at the start of this run as possibly folded by a crashed run."""
        self.doubt = dict(ends) if self.crashed else {}

    def finish(self) -> None:
        """Note in the manifests that this run ended cleanly, with no batch begun after its manifest.

        It is not noted before this run has read everything that an earlier run may have folded without a manifest.
        """
        if not self.replays:
            self.save_everywhere(self.changed(clean=True), FINISH, commits=False)

    def list_dead(self, entries: set[Entry]) -> None:
        """List dead letters of inner stages in every store, before anything of their batch is persisted."""
        self.rewrite_ledger(self.ledger.changed(Changes(added=entries)))

    def rewrite_ledger(self, ledger: Ledger) -> None:
        """Write another ledger into every store, without changing the flow's progress."""
        self.note(self.changed(**ledger.fields()))

    def note(self, manifest: Manifest) -> None:
        """Write a manifest with unchanged progress into every store, and continue from it."""
        self.save_everywhere(manifest, LEDGER, commits=False)
        self.advanced(manifest)

    def changed(self, **changed: Any) -> Manifest:
        """The current manifest with changed fields and the same progress."""
        before = self.manifest or Manifest(self.epoch, 0, **self.ledger.fields())
        return msgspec.structs.replace(before, **{"epoch": self.epoch, "clean": False, **changed})

    def superseded(self) -> bool:
        """Whether a newer run has acquired an epoch; whatever this run still does no longer counts."""
        return self.stores[self.flow.stage_names[0]].installed_epoch(self.ref) > self.epoch

    def close(self) -> None:
        """Close every store."""
        for _, store in self.distinct_stores():
            store.close()

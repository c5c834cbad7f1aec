"""One run of a flow against its stores: epoch, manifests, where to start, and what to write when a batch is done."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from aggregations.definition.flow import Flow, Stage
from aggregations.per_message.ledger import Changes, Doubt, Entry, Ledger
from aggregations.run.common import common
from aggregations.run.growth import advance
from aggregations.run.incarnations import Incarnations, merge_incarnations
from aggregations.run.shapes import check_states
from aggregations.run.start import LOSSES, Risk, check_marks, check_stores, refuse
from persistence.cas import manifest_behind
from persistence.commit.faults import EPOCH, FINISH, LEDGER, effect
from persistence.commit.order import store_order
from persistence.findings import Finding
from persistence.growth import METADATA_MAX_AGE_SECONDS, Ends
from persistence.manifest import Growth, Manifest, Progress
from persistence.marks import Bucket, KnownMarks
from persistence.protocol import FlowRef, StageRef, StateStore
from persistence.registry import open_store

Offsets = Mapping[tuple[str, int], int]
"""(topic, partition) to next offset."""


@dataclass(slots=True)
class Run:
    """A run that holds the flow's epoch in all of its stores.

    Attributes:
        flow: The flow.
        ref: Its name and generation.
        stores: Open store by stage name.
        urls: URL by stage name.
        epoch: Epoch of this run.
        manifest: Where the run is; None for a flow that never ran. Partitions it does not name start at their
            beginning.
        accept_definition: Continue states of any other definition that fit.
        earlier: Earlier definitions by stage whose states are continued; see `Manifest.earlier`.
        accept_disorder: Read new partitions at once although the order of what is published is lost.
        accept_eviction: Evict positions although partitions were added before the topic was read to its end.
        growth: The growth of the consumed topic that is under way, as of the batch at hand.
        manifests: (first stage of the store, its manifest), upstream first, as they were when the run began.
        ledger: Dead letters without a hole, as `manifest` has them.
        crashed: A run before this one did not end of its own accord: it may have folded what no manifest says.
        doubt: Offset by topic and partition below which such a run may have folded records; see `ask_doubt`.
        known: What buckets have acknowledged, as far as this run knows.
        since: Epoch since which marks count; see `Manifest.since`.
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
    growth: Growth | None = None
    manifests: Sequence[tuple[str, Manifest | None]] = ()
    ledger: Ledger = field(init=False)
    crashed: bool = False
    doubt: Doubt = field(default_factory=dict)
    known: KnownMarks = field(init=False)
    since: int = 0
    _saved: dict[str, tuple[int, int]] = field(default_factory=dict)
    _marks: dict[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    _former: Manifest | None = None  # of a topic that was created again, until a batch of the new one is folded

    def __post_init__(self) -> None:
        self.ledger = Ledger.of(self.ref.flow, self.ref.generation, self.manifest)
        self.known = KnownMarks(self.ref, [stage.name for stage in self.flow.stages])

    @property
    def source(self) -> str:
        """Name of the consumed topic."""
        assert self.flow.topic is not None
        return self.flow.topic.name

    @property
    def evicts(self) -> bool:
        """Whether histories evict what they have no room for: not while the consumed topic grows."""
        return self.growth is None or self.accept_eviction

    @property
    def positions(self) -> dict[int, int]:
        """Next offset by partition of the consumed topic, as the manifest has it."""
        parts = self.manifest.positions.get(self.source, {}) if self.manifest else {}
        return {partition: progress.next_offset for partition, progress in parts.items()}

    def look(
        self,
        partitions: int,
        *,
        clock_ms: int,
        ends: Ends | None,
        shared: bool = False,
        max_age_seconds: float = METADATA_MAX_AGE_SECONDS,
    ) -> bool:
        """Note how many partitions the consumed topic has, before a batch is folded; see `aggregations.run.growth.advance`.

        Args:
            partitions: How many it has, asked after the batch was read.
            clock_ms: Milliseconds since 1970.
            ends: Asks for the ends of the topic.
            shared: A key was met in two partitions.
            max_age_seconds: How long producers may not know of new partitions.

        Returns:
            Whether the growth is another one than before.
        """
        before, positions = self.growth, self.positions
        self.growth = advance(
            before,
            known=len(positions),
            now=partitions,
            clock_ms=clock_ms,
            max_age_ms=round(max_age_seconds * 1000),
            positions=positions,
            ends=ends,
            shared=shared,
        )
        return self.growth != before

    @property
    def start(self) -> dict[tuple[str, int], int]:
        """Next offset per topic and partition."""
        positions = self.manifest.positions if self.manifest else {}
        return {(topic, p): progress.next_offset for topic, parts in positions.items() for p, progress in parts.items()}

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
        for stage in self.flow.stages:
            first.setdefault(self.urls[stage.name], stage.name)
        return [
            (first[url], self.stores[first[url]]) for url in store_order(self.urls[s.name] for s in self.flow.stages)
        ]

    @property
    def topic_ids(self) -> dict[str, str]:
        """The topic ids that the manifest knows as the current ones: of consumed topics and of root topics."""
        if self.manifest is None:
            return {}
        return {**{topic: ids[-1] for topic, ids in self.manifest.incarnations.items()}, **self.manifest.topic_ids}

    def incarnations(self, current: Mapping[str, str]) -> Incarnations:
        """Topic ids known so far, and the current ones."""
        return Incarnations(self.manifest.incarnations if self.manifest else {}, current)

    def following(
        self,
        offsets: Offsets,
        topic_ids: Mapping[str, str],
        incarnations: Mapping[str, tuple[str, ...]],
        changes: Changes | None = None,
    ) -> Manifest:
        """The manifest once a batch that ends at these next offsets is persisted, with its changes of the ledger.

        A manifest never goes back within an incarnation of a topic; a topic created again starts anew.
        """
        before = self.manifest
        positions: dict[str, dict[int, Progress]] = {}
        if before is not None:
            for topic, partitions in before.positions.items():
                known = before.topic_ids.get(topic, "")
                if topic_ids.get(topic, known) == known:
                    positions[topic] = dict(partitions)
        for (topic, partition), offset in offsets.items():
            mine = positions.setdefault(topic, {})
            old = mine.get(partition)
            mine[partition] = Progress(max(offset, old.next_offset if old else 0))
        return Manifest(
            epoch=self.epoch,
            batch=self.batch,
            positions=positions,
            topic_ids={**(before.topic_ids if before else {}), **topic_ids},
            # A consumed topic need not be anybody's root, and its ids must be in order of age all the same.
            incarnations=merge_incarnations(incarnations, {topic: [one] for topic, one in topic_ids.items() if one}),
            definitions=self.definitions(),
            **self.ledger.changed((changes or Changes()).resolved()).fields(),
            growth={} if self.growth is None else {self.source: self.growth},
        )

    def definitions(self) -> dict[str, str]:
        """Definition hash by stage."""
        return {stage.name: stage.definition for stage in self.flow.stages}

    def homes(self) -> dict[str, str]:
        """By stage the name of its store: its first stage's."""
        names = {self.urls[name]: name for name, _ in self.distinct_stores()}
        return {stage.name: names[self.urls[stage.name]] for stage in self.flow.stages}

    def save_manifest(self, name: str, manifest: Manifest, *, commits: bool = True) -> None:
        """Write a manifest into the store of that name, with the stages that it keeps and what buckets acknowledged.

        Args:
            name: The store: its first stage.
            manifest: The manifest.
            commits: All that buckets acknowledged so far is below its offsets. Otherwise it says of them what the one
                before said: what a half-written batch saved may go back with a store, and is written again.

        Raises:
            StoreWentBack: The store has an older manifest than this run knows of.
        """
        former = self._former
        if former is not None and manifest.topic_ids == former.topic_ids:
            # Beside the former topic's id, offsets of the new one would be taken for its own.
            manifest = msgspec.structs.replace(manifest, positions=former.positions, growth=former.growth)
        stages = [stage.name for stage in self.flow.stages]
        # Of the stages here and downstream: one upstream that goes back with its manifest is filled again.
        if commits:
            self._marks[name] = self.known.acknowledged(stages[stages.index(name) :])
        marks = self._marks.get(name, {})
        marked = msgspec.structs.replace(self._of_store(name, manifest), marks=marks, since=self.since)
        self.stores[name].save_manifest(self.ref, marked, after=self._saved.get(name, (0, 0)))
        self._saved[name] = (manifest.epoch, manifest.batch)

    def check_progress(self) -> None:
        """Look whether a store went back as a whole, before a batch is folded.

        What a batch saved upstream of it would tell of marks that it does not hold any more, and the next start would
        be refused, although the replay fills all of it again.

        Raises:
            StoreWentBack: A store has an older manifest than this run saved.
        """
        for name, store in self.distinct_stores():
            found = store.load_manifest(self.ref)
            at = (found.epoch, found.batch) if found is not None else (0, 0)
            if at < self._saved.get(name, (0, 0)):
                raise manifest_behind(self.ref, self._saved[name], at)

    def _of_store(self, name: str, manifest: Manifest) -> Manifest:
        kept = tuple(stage for stage, home in self.homes().items() if home == name)
        return msgspec.structs.replace(manifest, definitions=self.definitions(), kept=kept, earlier=self.earlier)

    def _read(self, accept: Sequence[str]) -> None:
        """Read how far each store is.

        Raises:
            RunRefusedError: They do not fit together or to the flow, and that risk is not accepted.
        """
        for _ in range(2):
            # Upstream first: another run at work writes downstream first. If it has only just begun, the first look may
            # be older than its first manifest.
            self.manifests = [(name, store.load_manifest(self.ref)) for name, store in self.distinct_stores()]
            if all(manifest for _, manifest in self.manifests):
                break
        refuse(self._begin(), accept)
        for stage in self._redefined():
            check_states(stage, self.stage_ref(stage), self.stores[stage.name])
        self.advanced(common([manifest for _, manifest in self.manifests], self.ref))

    def _redefined(self) -> list[Stage]:
        """Stages that a manifest knows by another definition; with those definitions all are noted as continued."""
        found = [manifest for _, manifest in self.manifests if manifest is not None]
        earlier: dict[str, tuple[str, ...]] = {}
        redefined = []
        for stage in self.flow.stages:
            made = {one.definitions[stage.name] for one in found if stage.name in one.definitions}
            if made - {stage.definition}:
                redefined.append(stage)
            made |= {definition for one in found for definition in one.earlier.get(stage.name, ())}
            if made - {stage.definition}:
                earlier[stage.name] = tuple(sorted(made - {stage.definition}))
        self.earlier = earlier
        return redefined

    def earlier_of(self, stage: Stage) -> Collection[str] | None:
        """Earlier definitions of a stage whose states are continued; None for any."""
        return None if self.accept_definition else self.earlier.get(stage.name, ())

    def _note_stages(self) -> None:
        """Write the flow's stages into every store that has others noted, before anything is folded.

        Of a batch that is half written nobody could tell otherwise which stages were there. Where nothing has begun,
        every store gets a manifest: from then on one that has none has lost it. A loss that was accepted is noted, too:
        the next run need not accept it again, wherever this one dies.
        """
        begun = any(manifest and manifest.begun for _, manifest in self.manifests)
        for name, manifest in reversed(self.manifests):
            if manifest is None and begun:
                continue  # accepted: it gets one with the first positions
            noted = self._of_store(name, msgspec.structs.replace(manifest or Manifest(0, 0, seen={}), epoch=self.epoch))
            if manifest is None or _stages(manifest) != _stages(noted) or manifest.since != self.since:
                effect(EPOCH, lambda name=name, noted=noted: self.save_manifest(name, noted))  # type: ignore[misc]

    def start_at(self, topic: str, topic_id: str, starts: Mapping[int, int], growth: Growth | None = None) -> None:
        """Start from these offsets of a topic, and write them into every store where they are not the manifest's.

        Records of a partition that expire before the first one of it is read are then missed as any others. A
        topic that was created again is not written down before a batch of it is folded.
        """
        before, self.growth = self.manifest or Manifest(self.epoch, 0, **self.ledger.fields()), growth
        begun = {partition: Progress(offset) for partition, offset in starts.items()}
        self.manifest = msgspec.structs.replace(
            before, positions={**before.positions, topic: begun}, growth={} if growth is None else {topic: growth}
        )
        if before.topic_ids.get(topic, topic_id) != topic_id:
            self._former = self._former or before
            return
        if before.positions == self.manifest.positions and before.growth == self.manifest.growth:
            return
        named = {topic: topic_id} if topic_id else {}
        self.manifest = msgspec.structs.replace(
            self.manifest,
            epoch=self.epoch,
            topic_ids={**before.topic_ids, **named},
            incarnations=merge_incarnations(before.incarnations, {name: [one] for name, one in named.items()}),
            definitions=self.definitions(),
        )
        self._save_everywhere(self.manifest)

    def note_growth(self) -> None:
        """Write a new growth down before anything of its batch is persisted.

        A key in two partitions of a batch that a crash leaves half written is no such key to the replay.
        """
        assert self.manifest is not None
        if self.growth is None or self.growth == self.manifest.growth.get(self.source):
            return
        self._note(self.noting())

    def noting(self) -> Manifest:
        """The manifest with the growth that was seen since, between two batches."""
        return self._changed(growth={} if self.growth is None else {self.source: self.growth})

    def _save_everywhere(self, manifest: Manifest) -> None:
        """Write a manifest outside of a commit, downstream store first."""
        for name, _ in reversed(self.distinct_stores()):
            effect(EPOCH, lambda name=name: self.save_manifest(name, manifest))  # type: ignore[misc]

    def check_marks(self) -> None:
        """Look at every bucket anew, after tasks whose reports are lost; from now on this run knows what they hold.

        Raises:
            StoreWentBack: A bucket has less than it acknowledged to this run, or to a bucket upstream of it.
        """
        self._learn(buckets := self._buckets())
        for held in buckets.values():
            for one in held.values():
                for stage, marks in one.downstream.items() if one.epoch == self.epoch else ():
                    self.known.check(stage, marks)

    def _buckets(self) -> dict[str, Mapping[str, Bucket]]:
        """Every bucket of every stage, where stores keep marks."""
        return {
            stage.name: self.stores[stage.name].marks(self.stage_ref(stage))
            for stage in self.flow.stages
            if self.stores[stage.name].capabilities.marked
        }

    def _learn(self, buckets: Mapping[str, Mapping[str, Bucket]]) -> None:
        for stage, held in buckets.items():
            self.known.learn(stage, {bucket: one.mark for bucket, one in held.items()})

    def _begin(self) -> list[Finding]:
        """Read what manifests and buckets say, and find what does not fit."""
        found = [manifest for _, manifest in self.manifests if manifest is not None]
        self.since = max((one.since for one in found), default=0)
        self._saved = {name: (one.epoch, one.batch) for name, one in self.manifests if one is not None}
        self._marks = {name: one.marks for name, one in self.manifests if one is not None}
        self._learn(buckets := self._buckets())
        homes = self.homes()
        findings = [
            *check_stores(self.flow.name, self.manifests, self.definitions(), homes),
            *check_marks(self.flow.name, self.manifests, buckets, homes, self.since),
        ]
        if any(one.risk in LOSSES for one in findings):
            # It counts only if this is accepted: what had been acknowledged before is then no longer looked for.
            self.since = self.epoch
        return findings

    def advanced(self, manifest: Manifest | None) -> None:
        """Go on from a manifest that every store has."""
        self.manifest = manifest
        self.ledger = Ledger.of(self.ref.flow, self.ref.generation, manifest)

    @property
    def replays(self) -> bool:
        """Whether a run that crashed may have folded records that this one has yet to commit."""
        start = self.start
        read = bool(self.doubt) and all(start.get(place, 0) >= end for place, end in self.doubt.items())
        return self.crashed and not read

    def doubted(self, ends: Offsets) -> None:
        """Doubt what a run that crashed may have read: all below the ends of the partitions as of this run's start."""
        self.doubt = dict(ends) if self.crashed else {}

    def finish(self) -> None:
        """Say that this run ended of its own accord, with nothing begun behind its manifest.

        Not as long as it has not read all that a run before it may have folded and did not say.
        """
        if self.manifest is not None and not self.replays:
            manifest = self._changed(clean=True)
            for name, _ in reversed(self.distinct_stores()):
                effect(FINISH, lambda name=name: self.save_manifest(name, manifest, commits=False))  # type: ignore[misc]

    def list_dead(self, entries: set[Entry]) -> None:
        """List dead letters of inner stages in every store, before anything of their batch is persisted."""
        self.rewrite_ledger(self.ledger.changed(Changes(added=entries)))

    def rewrite_ledger(self, ledger: Ledger) -> None:
        """Write another ledger into every store, where the flow is as far as it was."""
        self._note(self._changed(**ledger.fields()))

    def _note(self, manifest: Manifest) -> None:
        """Write a manifest that is as far as the one before into every store, and go on from it."""
        for name, _ in reversed(self.distinct_stores()):
            effect(LEDGER, lambda name=name: self.save_manifest(name, manifest, commits=False))  # type: ignore[misc]
        self.advanced(manifest)

    def _changed(self, **changed: Any) -> Manifest:
        """A manifest that is as far as the one before."""
        before = self.manifest or Manifest(self.epoch, 0)
        fields = {"epoch": self.epoch, "definitions": self.definitions(), "clean": False, **changed}
        return msgspec.structs.replace(before, **fields)

    def superseded(self) -> bool:
        """Whether a newer run has taken the epoch: it counts from there, whatever this one still has to do."""
        return self.stores[self.flow.stages[0].name].installed_epoch(self.ref) > self.epoch

    def close(self) -> None:
        """Close every store."""
        for _, store in self.distinct_stores():
            store.close()


def begin(
    flow: Flow[Any],
    urls: Mapping[str, str],
    *,
    generation: int = 1,
    accept: Sequence[str] = (),
) -> Run:
    """Begin a run: take the epoch, fence every older run, then read how far each store is.

    The epoch comes from the first stage's store and is installed in all stores before anything is loaded.

    Args:
        flow: The flow.
        urls: URL of the store by stage name, from `bind`.
        generation: Generation of the states.
        accept: Names of risks taken on purpose; see `aggregations.run.start.Risk`.

    Raises:
        RunRefusedError: The stores do not fit together or to the flow, and that risk is not accepted.
        Fenced: A newer run has begun meanwhile.
    """
    with _opened(flow, urls, generation, accept_definition=Risk.DEFINITION in accept) as run:
        run.accept_disorder = Risk.GROWN_UNDRAINED in accept
        run.accept_eviction = Risk.GROWTH_FULL in accept
        ref, ordered = run.ref, run.distinct_stores()
        authority = ordered[0][1]
        above = max(store.installed_epoch(ref) for _, store in ordered)
        run.epoch = effect(EPOCH, lambda: authority.acquire_epoch(ref, above=above))
        for _, store in ordered[1:]:
            effect(EPOCH, lambda store=store: store.install_epoch(ref, run.epoch))  # type: ignore[misc]
        run._read(accept)
        run._note_stages()
        found = [manifest for _, manifest in run.manifests if manifest is not None]
        run.crashed = not all(manifest.clean for manifest in found)
        if any(manifest.clean for manifest in found):
            run.advanced(run._changed())  # from here on it has not ended of its own accord
            run._save_everywhere(run._changed())
        run.growth = run.manifest.growth.get(run.source) if run.manifest else None
    return run


def look(flow: Flow[Any], urls: Mapping[str, str], *, generation: int = 1, accept: Sequence[str] = ()) -> Run:
    """Open a flow's stores only to read them, with the checks of `begin`. A run that goes on is not disturbed.

    It takes no epoch and writes nothing.

    Args:
        flow: The flow.
        urls: URL of the store by stage name, from `bind`.
        generation: Generation of the states.
        accept: Names of risks taken on purpose; see `aggregations.run.start.Risk`.

    Raises:
        RunRefusedError: The stores do not fit together or to the flow, and that risk is not accepted.
    """
    with _opened(flow, urls, generation) as run:
        run._read(accept)
        run.growth = run.manifest.growth.get(run.source) if run.manifest else None
    return run


@contextmanager
def _opened(
    flow: Flow[Any], urls: Mapping[str, str], generation: int, *, accept_definition: bool = False
) -> Iterator[Run]:
    """A run without an epoch, on open stores; they are closed when the block raises."""
    with ExitStack() as stack:
        handles: dict[str, StateStore] = {}
        for url in dict.fromkeys(urls.values()):
            handles[url] = open_store(url)
            stack.callback(handles[url].close)
        stores = {name: handles[url] for name, url in urls.items()}
        yield Run(flow, FlowRef(flow.name, generation), stores, urls, 0, None, accept_definition)
        stack.pop_all()


def _stages(manifest: Manifest) -> tuple[object, ...]:
    """What a manifest says of stages: those of the flow, in order, those of its store, and earlier definitions."""
    return list(manifest.definitions.items()), manifest.kept, manifest.earlier

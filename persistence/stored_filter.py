"""A filter whose states are kept in a store, with the positions that they cover."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeAlias

from envelope import EnvelopeError, Reason, TopicPartition, Verdict
from envelope.filters.arrival import UNIDENTIFIED, Filter, Ruling, rejected
from envelope.filters.states import FilterStates
from envelope.filters.turns import in_turns, time_extractor
from envelope.limits import OFFSET_MASK, number_of
from persistence.commit.faults import LEDGER, effect
from persistence.commit.order import commit
from persistence.commit.steps import CommitStep
from persistence.kept import Kept, KeptValues, decode_kept, merged_topic_ids
from persistence.protocol import FlowRef, StateStore
from persistence.registry import open_store

Judged: TypeAlias = tuple[Any, Ruling]
"""A record and the ruling about it."""

_REPLAYED: Final = Ruling(Verdict.DUPLICATE, forward=False)
"""Of a record that its state covers: what was passed on then was published before the state was written."""
CACHED: Final = 10_000
"""States that are kept in memory from batch to batch."""
_RELEASED: Final = Ruling(Verdict.ACCEPTED, forward=True)


@dataclass(slots=True)
class Filtered:
    """What a filter made of a batch.

    Attributes:
        passed: The records that are passed on, in order, those included that were held back before.
        rejected: The records that belong into the dead-letter topic, with reason and detail.
        verdicts: Number of records by verdict.
        warnings: What the filter warns of.
    """

    passed: list[Judged] = field(default_factory=list)
    rejected: list[Judged] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)


def filter_states(
    rule: Filter[Any], store: StateStore | str, *, owner: str = "", generation: int = 1
) -> Iterator[tuple[bytes, Any]]:
    """Read the states of a filter, as its `dump` returned them, by scope. Nothing is fenced, and whoever writes them continues.

    Those of a flow's filter are read by `jobs.states` and `headwater inspect`.

    Args:
        rule: The filter.
        store: The store, or its URL.
        owner: Whose states: `republisher.GROUP` for a republisher; the filter's own name, as of a `StoredFilter`, if empty.
        generation: Their generation.

    Raises:
        Terminal: The states are of another type of filter.
        StoreError: The store failed.
    """
    kind, stage = type(rule).__name__, FlowRef(owner or rule.name, generation).stage(rule.name)
    opened = open_store(store) if isinstance(store, str) else store
    try:
        for scope, stored in opened.scan(stage):
            yield scope, decode_kept(stored.value, kind, stored.version, stage, scope).value
    finally:
        if isinstance(store, str):
            opened.close()


class StoredFilter:
    """Judges batches of records, and writes states only after what was passed on is published.

    The order is that of a flow's commit: publish, states, progress. A crash between two of these steps loses nothing.
    After a crash read on from `start`: a record whose state was written is not passed on again. A record that was
    published, but whose state was not written, is published again; so let `publish` be idempotent, or let readers judge
    the copies, as a flow does.

    A new object of the same name fences the one before it. After an error, read on from `start`.

    A filter over all partitions (`partitions=`) passes on the first of two duplicates, and between partitions the batch
    decides which one that is: partitions are judged in turn, by the time of their records. So an `unfinished` batch is
    repeated.

    Args:
        rule: The filter. Its name is the name of its states in the store.
        store: A store, or its URL.
        generation: Another generation begins without states.
    """

    def __init__(self, rule: Filter[Any], store: StateStore | str, *, generation: int = 1) -> None:
        self.filter = rule
        self._kept = KeptValues(store, rule.name, type(rule).__name__, generation=generation)
        self._held: dict[TopicPartition, dict[Any, Any]] = {}
        self._known: dict[bytes, Kept] = {}
        self._states = FilterStates(rule)
        self._spans = bool(getattr(rule, "partitions", 0))
        self._time = time_extractor(rule)

    @property
    def start(self) -> Mapping[TopicPartition, int]:
        """Offset to read next, by topic and partition; a partition that is not there is read from its beginning."""
        return self._kept.start

    @property
    def unfinished(self) -> Mapping[TopicPartition, int]:
        """Next offset, by topic and partition, after a batch that `process` has to repeat as it was; empty for none.

        Only a filter over all partitions repeats a batch, after a crash or an error.
        """
        return self._kept.unfinished

    def process(self, records: Iterable[Any], publish: Callable[[Filtered], object]) -> Filtered:
        """Judge a batch, publish what passes, and write the states.

        Args:
            records: Records in the order in which they were read: within a partition in the order of offsets. With a
                `leader_epoch`, records that were written anew at offsets that were read are judged, too.
            publish: Produces what is passed on, and the dead letters, and returns when all are acknowledged.

        Raises:
            ValueError: The offsets of a partition do not ascend, or the records are not those of the `unfinished` batch.
            Terminal: A topic was created again, as the topic ids of the records show.
            StoreError: The store failed, or a newer object of this name has begun.
        """
        batch = effect(CommitStep.FETCH, lambda: list(records))
        _check_order(batch)
        known = self._kept.manifest.topic_ids if self._kept.manifest else {}
        topic_ids = merged_topic_ids(known, batch, self._kept.ref)
        if self._spans:
            self._check_repeated(batch)
            batch = [batch[turn] for turn in in_turns(batch, self._time)]
        scopes = [self._scope(record) for record in batch]
        try:
            work = self._judged(batch, scopes)
            if self._spans and work.ends():
                effect(LEDGER, lambda: self._kept.begin_batch(work.ends(), topic_ids))
            name = self.filter.name
            commit(
                lambda: publish(work.filtered),
                [(name, lambda: self._kept.save(work.written()))],
                [(name, lambda: self._kept.save_manifest(work.ends(), topic_ids))],
            )
        except BaseException:
            self._forget()
            raise
        self._held = {place: held for place, held in work.held.items() if held}
        if len(self._known) > CACHED:
            self._forget()
        return work.filtered

    def state(self, scope: bytes) -> Any:
        """The stored state of a scope."""
        kept = self._kept.load([scope])[scope]
        return self.filter.zero() if kept.value is None else self.filter.load(kept.value)

    def close(self) -> None:
        """Release the store's connections."""
        self._kept.close()

    def _judged(self, batch: list[Any], scopes: list[bytes | Ruling]) -> "_Work":
        """Load the states that are not known yet, and judge a batch."""
        missing = [scope for scope in scopes if isinstance(scope, bytes) and scope not in self._known]
        loaded = effect(CommitStep.LOAD, lambda: self._kept.load(missing))
        for key, kept in loaded.items():
            if kept.value is not None:
                self._states.put(key, kept.value)
        self._known |= loaded
        work = _Work(self._states, self._known, {place: dict(held) for place, held in self._held.items()})
        for record, scope in zip(batch, scopes, strict=True):
            work.judge(record, scope)
        return work

    def _check_repeated(self, batch: list[Any]) -> None:
        begun = self.unfinished
        ends = {TopicPartition(one.topic, one.partition): one.offset + 1 for one in batch if one.offset is not None}
        if begun and ends != begun:
            places = ", ".join(f"{at.topic}:{at.partition} up to {end}" for at, end in begun.items())
            raise ValueError(
                f"filter {self.filter.name!r}: a batch was begun and has not ended. Pass its records alone first: {places}"
            )

    def _forget(self) -> None:
        """Load states afresh for the next batch: these may differ from those in the store, or are too many."""
        self._known, self._states = {}, FilterStates(self.filter)

    def _scope(self, record: Any) -> bytes | Ruling:
        """Key of a record's state, or the ruling for a record without one."""
        try:
            scope = self.filter.scope(record)
            longest = self._kept.store.capabilities.max_key_bytes
            if scope is not None and longest is not None and len(scope) > longest:
                raise EnvelopeError(Reason.KEY_TOO_LONG, f"the key of its state has more than {longest} bytes")
        except EnvelopeError as error:
            return rejected(error)
        return UNIDENTIFIED if scope is None else scope


class _Work:
    """A batch while it is judged.

    Args:
        states: The states of its scopes, which it changes.
        known: The same as stored, with positions and versions.
        held: Records that are held back, by partition and number (`envelope.limits.number_of`).
    """

    def __init__(
        self, states: FilterStates, known: Mapping[bytes, Kept], held: dict[TopicPartition, dict[Any, Any]]
    ) -> None:
        self.held = held
        self.filtered = Filtered()
        self._states = states
        self._known = known
        self._changed: dict[bytes, Kept] = {}
        self._offsets_held = getattr(states.filter, "held", None)
        self._ends: dict[TopicPartition, int] = {}
        self._waiting: dict[bytes, Collection[int]] = {}

    def judge(self, record: Any, scope: bytes | Ruling) -> None:
        """Decide about a record, with the state of its scope."""
        place = TopicPartition(record.topic, record.partition)
        if record.offset is not None:
            self._ends[place] = record.offset + 1
        if isinstance(scope, Ruling):
            self._note(record, scope)
            return
        kept = self._known[scope]
        if record.offset is not None and kept.covers(record):
            self._replay(record, scope, place)
            return
        ruling = self._states.judge_in(scope, record)
        self._changed[scope] = kept
        if record.offset is not None:
            kept.advance(record)
        number = number_of(record)
        if ruling.verdict is Verdict.HELD or number in ruling.released:
            self.held.setdefault(place, {})[number] = record
        self._note(record, ruling)
        waiting = self.held.get(place, {})
        for released in ruling.released:
            if released in waiting:
                self.filtered.passed.append((waiting.pop(released), _RELEASED))
            else:  # the broker lost it, and gives its offset to another one
                at = f"{place.topic}:{place.partition}: the record at offset {released & OFFSET_MASK}"
                self.filtered.warnings.append(f"{at}, which was held back, is lost")

    def written(self) -> dict[bytes, Kept]:
        """The states that have changed, as they are to be stored."""
        for scope, kept in self._changed.items():
            kept.value = self._states.dump_of(scope)
        return self._changed

    def ends(self) -> dict[TopicPartition, int]:
        """The offsets to resume from: a record that is held back is read again."""
        return {
            place: min([end, *(number & OFFSET_MASK for number in self.held.get(place, ()))])
            for place, end in self._ends.items()
        }

    def _replay(self, record: Any, scope: bytes, place: TopicPartition) -> None:
        """Handle a record that its state covers: it is read again if it is held back, and otherwise dropped."""
        if (
            scope not in self._waiting
        ):  # a batch replays first, so none of these is released before the last one is read
            state = self._states.state(scope)
            self._waiting[scope] = self._offsets_held(state) if self._offsets_held else ()
        if (number := number_of(record)) in self._waiting[scope]:
            self.held.setdefault(place, {})[number] = record
            self._note(record, Ruling(Verdict.HELD, forward=False))
        else:
            self._note(record, _REPLAYED)

    def _note(self, record: Any, ruling: Ruling) -> None:
        self.filtered.verdicts[ruling.verdict.value] += 1
        if ruling.warning:
            self.filtered.warnings.append(ruling.warning)
        if ruling.forward:
            self.filtered.passed.append((record, ruling))
        elif ruling.verdict.diverts:
            self.filtered.rejected.append((record, ruling))


def _check_order(batch: list[Any]) -> None:
    by_place: dict[TopicPartition, list[Any]] = {}
    for record in batch:
        if record.offset is not None:
            by_place.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
    for place, records in by_place.items():
        for one, following in pairwise(records):
            if (number_of(following) or 0) <= (number_of(one) or 0):
                raise ValueError(
                    f"{place.topic}:{place.partition}: offset {following.offset} comes after {one.offset}; "
                    "give the records of a partition in the order of their offsets"
                )

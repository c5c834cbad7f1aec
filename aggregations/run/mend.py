"""Mends states of one stage in place: each becomes what a new fold of the flow's history makes of it.

A mend changes the states of one moment, the end of a batch, and the flow's progress stays where it is. So whatever a crash
leaves, each state is the former or the mended one, both of that moment, and the mend is repeated, or the flow continues:

1. It acquires an epoch in every store. Older runs and commands write nothing afterwards.
2. It is noted in the pointer, with who mends what, when and why.
3. The manifests get the epoch, and note that states are being mended: whoever reads the states of one moment is refused,
   or notices the change.
4. The mended states are published, where the stage publishes its states: their versions are those of the next writes.
5. They are written.
6. The manifests get the next batch, which has read nothing, and no longer have the note. Neither have those of a run.

A state whose key is not in the history becomes empty. It stays in the store, so that its version rises on.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from aggregations.definition.flow import Flow, Stage
from aggregations.definition.sessions import remaining
from aggregations.definition.windows import Window
from aggregations.errors import RunRefusedError
from aggregations.per_message.ledger import Entry, Ledger
from aggregations.per_message.stage import KeyState
from aggregations.per_message.times import latest
from aggregations.report import Report
from aggregations.run.border import check_border, check_unchanged
from aggregations.run.live import check_live
from aggregations.run.run import Run
from aggregations.run.snapshots import MendedSnapshot, mended_snapshots_of
from aggregations.run.states import renewed_due, save_states
from aggregations.run.unproven import stages_up_to, unproven_apart
from envelope import Histories, Position
from envelope.dedup.history import History
from envelope.dedup.lanes import group_of, healed_lane, is_healed
from envelope.dedup.lineage import DIED, event_of, position_order
from persistence.commit.faults import EPOCH, MEND, effect
from persistence.epochs import take_epoch
from persistence.manifest import Manifest
from persistence.protocol import StageRef, StateStore, Stored


class Mending(StrEnum):
    """What a mend does to a state."""

    CHANGED = "changed"
    """It has another result."""
    POSITIONS = "positions"
    """It has the same result, and holds other positions, or other holes of dead letters."""
    PUT_BACK = "put_back"
    """The store had none of this key."""
    EMPTIED = "emptied"
    """The history has nothing of this key."""


@dataclass(frozen=True, slots=True)
class Mend:
    """One state that is mended.

    Attributes:
        key: Key of the state.
        mending: What is done to it.
        state: The mended state, with the version of the live one.
        before: The live state, without sessions that have left; empty if the store had none.
    """

    key: bytes
    mending: Mending
    state: KeyState
    before: KeyState


def chosen_states(store: StateStore, ref: StageRef, stage: Stage, keys: Collection[bytes]) -> dict[bytes, Stored]:
    """The states of some keys of a stage, each in all of its windows, in the order of their keys."""
    window = stage.aggregate.window
    if not isinstance(window, Window):
        found = dict(store.load(ref, list(dict.fromkeys(keys))))
    else:
        found = {
            at: stored
            for key in keys
            for at, stored in store.scan(ref, begin=key + b"@", end=key + b"A")  # A: the byte after @
            if window.stage_key(at) == key
        }
    return dict(sorted(found.items()))


def mends_of(
    stage: Stage,
    live: Mapping[bytes, KeyState],
    folded: Mapping[bytes, KeyState],
    *,
    differing: Collection[bytes],
    gone: int | None,
    batch: int,
) -> list[Mend]:
    """What a mend does to states of a stage. Pure.

    Args:
        stage: The stage.
        live: Live states by key.
        folded: The states of the same keys that the history makes.
        differing: Keys whose results differ.
        gone: Due time up to which states may have left either store, in seconds since 1970; these are left alone.
        batch: Number of the batch under which they are written.

    Raises:
        RunRefusedError: The history folds a dead letter that waits.
    """
    found = [
        _mend(stage, key, live.get(key), folded.get(key), differs=key in differing, gone=gone, batch=batch)
        for key in sorted(live.keys() | folded.keys())
    ]
    return [one for one in found if one is not None]


def _mend(
    stage: Stage,
    key: bytes,
    live: KeyState | None,
    folded: KeyState | None,
    *,
    differs: bool,
    gone: int | None,
    batch: int,
) -> Mend | None:
    dues = [_due(stage, key, state) for state in (live, folded) if state is not None]
    if gone is not None and all(due is not None and due <= gone for due in dues):
        return None
    if folded is not None and gone is not None and (due := _due(stage, key, folded)) is not None and due <= gone:
        folded = None
    old, new = live or KeyState(), folded or KeyState()
    histories = _histories(stage, key, old.histories, new.histories, batch)
    fold = new.fold
    if histories.lanes and not new.folded:  # all that it has are discarded dead letters
        fold = stage.aggregate.zero()
        differs = not old.folded or old.fold != fold
    if stage.aggregate.sessions is not None:
        fold = None if fold is None else remaining(fold, gone)
        old = replace(old, fold=None if old.fold is None else remaining(old.fold, gone))
    kept = new.kept or old.kept
    state = KeyState(fold, histories, old.version, new.time_us, latest(old.hole_us, new.hole_us), kept)
    if not differs and old.folded == state.folded and _held(old.histories) == _held(histories):
        return None
    if live is None:
        return Mend(key, Mending.PUT_BACK, state, old)
    if not histories.lanes and not histories.holes:
        return Mend(key, Mending.EMPTIED, state, old)
    return Mend(key, Mending.CHANGED if differs else Mending.POSITIONS, state, old)


def _due(stage: Stage, key: bytes, state: KeyState) -> int | None:
    """The time at which a state is due, in seconds since 1970; None if it stays."""
    window = stage.aggregate.window
    return window.due(key) if isinstance(window, Window) else renewed_due(state, stage.aggregate.renewed)


def _held(histories: Histories) -> tuple[object, ...]:
    """What histories know: the positions that each group holds, the floors, and the holes.

    Which lane of a group holds a position may depend on batches, if a copy arrived over another partition.
    """
    held: dict[str, set[Position]] = defaultdict(set)
    for lane, one in histories.lanes.items():
        held[group_of(lane)].update(one.held)
    floors = {lane: one.floor for lane, one in histories.lanes.items() if one.floor is not None}
    return {group: found for group, found in held.items() if found}, floors, histories.holes


def _histories(stage: Stage, key: bytes, old: Histories, new: Histories, batch: int) -> Histories:
    """The positions and holes of a mended state.

    They are those of the fold, except for dead letters: one that was discarded, or redriven before the history begins,
    has no hole in the live state, and is not accepted again. One that the fold does not know waits on.
    """
    lanes = {
        lane: replace(one, used=old.lanes[lane].used if lane in old.lanes else batch) if one.held else one
        for lane, one in new.lanes.items()
    }
    holes: dict[str, frozenset[Position]] = {}
    for group in new.holes.keys() | old.holes.keys():
        theirs, mine = new.holes.get(group, frozenset()), old.holes.get(group, frozenset())
        settled = {at for at in theirs - mine if _settled(old, group, at)}
        for at in settled:
            _take(lanes, old, group, at, batch)
        if taken := [at for at in mine - theirs if _settled(new, group, at)]:
            raise RunRefusedError(
                f"stage {stage.name}, key {key!r}: {len(taken)} of its dead letters that wait are folded by the history, and "
                "what follows the stage would never get them. Redrive them first (`headwater redrive`), and run the flow"
            )
        if left := (theirs - settled) | mine:
            holes[group] = left
    return Histories(lanes, holes)


def _settled(histories: Histories, group: str, position: Position) -> bool:
    """Whether a message at this position is folded, or counts as folded."""
    return any(one.holds(position) or one.reaches(position) for _, one in _lanes_of(histories, group))


def _take(lanes: dict[str, History], old: Histories, group: str, position: Position, batch: int) -> None:
    """Let lanes hold a position as those of other histories do."""
    for lane, history in _lanes_of(old, group):
        if not history.holds(position):
            continue
        known = lanes.get(lane, History())
        lanes[lane] = (
            known.healing([position], batch, replays=True)
            if is_healed(lane)
            else known.adding([position], len(known.held) + 1, batch, wide=history.wide)
        )


def _lanes_of(histories: Histories, group: str) -> list[tuple[str, History]]:
    healed = healed_lane(group)
    return [(lane, one) for lane, one in histories.lanes.items() if lane == healed or group_of(lane) == group]


def check_waiting(
    flow: Flow[Any], stage: Stage, live: Ledger, folded: Ledger, states: Mapping[bytes, KeyState]
) -> None:
    """Check that the history folds no dead letter that the live ledger lists, at a stage or before it. Pure.

    One that only the live ledger lists is folded for certain if a state holds the position of its event. If a floor is
    above this position, or it is listed by the coordinates of its record, it counts as folded, unless the fold lists as
    many dead letters that the live ledger does not list: the two may list one event in different ways.

    Args:
        flow: The flow.
        stage: The stage that is mended.
        live: The ledger of the live states.
        folded: The ledger of the fold.
        states: What the history makes of the states that are mended, by key.

    Raises:
        RunRefusedError: It does, and later stages would never get it.
    """
    names = stages_up_to(flow, stage)
    mine, theirs = (_entries(ledger, names) for ledger in (live, folded))
    found = [_folds(states, one) for one in mine - theirs]
    taken = found.count(True) or max(found.count(None) - len(theirs - mine), 0)
    if taken:
        raise RunRefusedError(
            f"flow {flow.name}: the history folds {taken} of the dead letters that wait to be redriven to stage {stage.name} "
            "or to one before it, and what follows the stage would never get them. Redrive them first (`headwater redrive`), "
            "and run the flow"
        )


def check_proven(flow: Flow[Any], stage: Stage, live: Ledger, folded: Ledger, report: Report) -> None:
    """Check that the fold has folded what the live states may have folded, at a stage or before it. Pure.

    Args:
        flow: The flow.
        stage: The stage that is mended.
        live: The ledger of the live states.
        folded: The ledger of the fold.
        report: The counts of the fold.

    Raises:
        RunRefusedError: It has not: a mend would take events out of states.
    """
    if apart := unproven_apart(flow, [stage], live, folded, report):
        raise RunRefusedError(
            f"flow {flow.name}: the fold finds {apart} of the redriven or retried messages of stage {stage.name}, or of one "
            "before it, unproven, and the live states may have folded them in batches that ended elsewhere. Begin with a "
            "snapshot that was made since they were folded (--snapshot FILE), or rebuild the flow with "
            "`headwater replay --apply`"
        )


def _entries(ledger: Ledger, stages: Collection[str]) -> set[Entry]:
    return {
        Entry(stage, group, position)
        for stage, groups in ledger.listed.items()
        if stage in stages
        for group, positions in groups.items()
        for position in positions
    }


def _folds(states: Mapping[bytes, KeyState], entry: Entry) -> bool | None:
    """Whether states have folded a dead letter; None if this is not known."""
    if entry.group.startswith(DIED):
        return None
    lanes = [one for state in states.values() for _, one in _lanes_of(state.histories, entry.group)]
    if any(entry.position in _events(position) for one in lanes for position in one.held):
        return True
    order = position_order(entry.position)
    return None if any(one.floor is not None and position_order(one.floor) >= order for one in lanes) else False


def _events(position: Position) -> set[Position]:
    """A position, and those of the elements that it may have been flat-mapped from."""
    return {event_of(position, items) for items in range(len(position))}


def check_can_mend(run: Run, what: str, grown: Callable[[Manifest], Sequence[str]] | None = None) -> Manifest:
    """Check that states can be mended, and return the manifest of the last batch.

    Args:
        run: A read-only run of the live generation.
        what: What is done, for the errors.
        grown: Returns the topics whose growth is not over; None if any in the manifest is not.

    Raises:
        RunRefusedError: The generation is not live, a run is at work or did not end cleanly, or partitions were added.
    """
    check_live(run)
    manifest = check_border(run, what, mends=True)
    if found := sorted(grown(manifest) if grown else manifest.growth):
        raise RunRefusedError(
            f"flow {run.flow.name}: partitions were added to {found[0]}, and not all records that may be in the "
            "wrong one are read. Run the flow until it has read them"
        )
    return manifest


def write_mends(
    run: Run,
    stage: Stage,
    mends: Sequence[Mend],
    *,
    what: str,
    note: Callable[[], Any],
    publish: Callable[[Sequence[MendedSnapshot]], Any],
    largest: Mapping[str, int] = {},
) -> int:
    """Write mended states. If there are none, only what a mend that was interrupted has noted is removed.

    Args:
        run: The run that `check_can_mend` checked, and that the live states were read with.
        stage: The stage.
        mends: The mended states.
        what: What is done, for the errors.
        note: Notes in the pointer who mends what, when and why.
        publish: Produces messages within the fault point `MEND`, and returns when all are acknowledged.
        largest: Largest record that can be produced to a topic, in bytes, by topic.

    Returns:
        Number of messages sent.

    Raises:
        RunRefusedError: A run has begun since the live states were read.
        Fenced: A run, or another command, has begun meanwhile.
        BrokerError: A message was not acknowledged. Repeat the mend.
        StoreError: A store does not answer. Repeat the mend.
    """
    if not mends and not any(one.mending for _, one in run.manifests if one):
        return 0
    check_live(run)
    check_unchanged(run, what)  # before the epoch, which would fence a run at work
    run.epoch = take_epoch(run.ref, [store for _, store in run.distinct_stores()], point=EPOCH)
    check_live(run)
    check_unchanged(run, what)
    if mends:
        note()
    assert run.manifest is not None
    manifest = msgspec.structs.replace(run.manifest, epoch=run.epoch, clean=True)
    run.save_everywhere(msgspec.structs.replace(manifest, mending=True), MEND, commits=False)
    run.advanced(manifest)
    states = {one.key: one.state for one in mends}
    before = {one.key: one.before for one in mends}
    messages = mended_snapshots_of(
        stage,
        states,
        before,
        ref=run.ref,
        epoch=run.epoch,
        batch=run.batch,
        published=manifest.published.get(stage.name),
        largest=largest,
    )
    if messages:
        publish(messages)
    if states:
        effect(MEND, lambda: save_states(run, stage, states))
    run.save_everywhere(msgspec.structs.replace(manifest, batch=run.batch), MEND)
    return len(messages)

"""One stage, message by message: verdicts and folds. Pure; the reference for the vectorised path."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aggregations.definition.element import Element
from aggregations.definition.flow import Aggregate
from aggregations.definition.folds import copied
from aggregations.definition.inputs import SiblingPolicy, siblings_of
from aggregations.definition.schemas import UNKNOWN, Schema
from aggregations.definition.sessions import remaining
from aggregations.per_message.arrivals import Arrival, passed_on
from aggregations.per_message.cause import Cause, refusal
from aggregations.per_message.closed import has_expired, judge_closed, reason_of, taken_by
from aggregations.per_message.folding import fold_one
from aggregations.per_message.ledger import Entry, Waiting
from aggregations.per_message.passing import Kept, keeping, passed_again
from aggregations.per_message.times import latest
from envelope import Decision, Histories, Node, Position, Reason, Route, Siblings, Standing, Verdict
from envelope.dedup.eviction import GrowthFullError
from envelope.dedup.histories import HolesFullError, in_order
from envelope.dedup.room import Room
from envelope.raised import Raised

_HELD = frozenset({Verdict.DUPLICATE, Verdict.DUPLICATE_IN_BATCH})
_SETTLED = _HELD | {Verdict.WINDOW_CLOSED}
_FIRST_SEEN = frozenset({Verdict.ACCEPTED, Verdict.LATE, Verdict.NEW_LANE})


@dataclass(frozen=True, slots=True)
class KeyState:
    """The state of one key.

    Attributes:
        fold: State of the fold; also None before anything was folded.
        histories: Positions that it holds.
        version: Version that was loaded; 0 when the store had none.
        time_us: Latest event time that was folded, in microseconds since 1970, in a stage whose states expire.
        hole_us: Latest event time of a hole in such a stage, or in one with sessions.
        kept: States of the fold from before records that later stages have rejected; see
            `aggregations.per_message.passing`.
    """

    fold: Any = None
    histories: Histories = field(default_factory=Histories)
    version: int = 0
    time_us: int | None = None
    hole_us: int | None = None
    kept: Kept = field(default_factory=dict)

    @property
    def folded(self) -> bool:
        """Whether anything was folded; otherwise it contains at most holes."""
        return bool(self.histories.lanes)


@dataclass(frozen=True, slots=True)
class Decided:
    """Result of one arrival.

    Attributes:
        arrival: The arrival.
        decision: Verdict, and whether it was folded.
        reason: Reason code when it goes to the dead-letter topic.
        detail: What was wrong, without any value of the message.
        emitted: Elements that the stage passes on for it.
        raised: Exception of user code, when that is the reason; else None.
        holds: The stage leaves holes; otherwise the ledger lists its dead letters.
        died: Another item of its record could not be folded here.
    """

    arrival: Arrival
    decision: Decision
    reason: Reason | None = None
    detail: str = ""
    emitted: tuple[Element[Any], ...] = ()
    raised: Raised | None = field(default=None, compare=False)
    holds: bool = True
    died: bool = field(default=False, compare=False)

    @classmethod
    def rejected(cls, arrival: Arrival, cause: Cause, *, holds: bool = True) -> "Decided":
        """An arrival that cannot be used."""
        decision = Decision(Verdict.REJECTED, fold=False)
        return cls(arrival, decision, cause.reason, cause.detail, raised=cause.raised, holds=holds)

    @property
    def failed(self) -> bool:
        """Whether this stage could not fold it."""
        return self.decision.verdict is Verdict.REJECTED and not self.arrival.transit

    @property
    def hole(self) -> bool:
        """Whether it left a hole in the state of its key."""
        return self.failed and self.holds

    @property
    def proven(self) -> bool:
        """Whether no earlier attempt can have folded it at any stage."""
        element, route = self.arrival.element, self.arrival.standing.route
        return route is Route.MISSING or (route is Route.PLAIN and not element.again)

    @property
    def settles(self) -> bool:
        """Whether the state holds the event, or never will. One item does not settle a record of which another failed."""
        arrival, verdict = self.arrival, self.decision.verdict
        too_late = arrival.closed and arrival.mine and verdict is Verdict.BELOW_FLOOR
        return not (arrival.transit or self.died) and (self.decision.fold or verdict in _SETTLED or too_late)

    @property
    def filled(self) -> tuple[Entry, ...]:
        """Entries of the ledger that are no longer missing: the state holds the event, or never will."""
        arrival = self.arrival
        if arrival.transit:
            return () if self.emitted or self.reason is not None else arrival.entries
        if not self.settles:
            return ()
        if arrival.element.route is Route.PLAIN:
            return arrival.entries
        # An earlier stage folds it late: it is an item of a record whose other items may have been rejected here.
        own = (len(arrival.standing.position), 1 + len(arrival.element.indices))
        return tuple(one for one in arrival.entries if len(one.position) == own[one.group != arrival.standing.group])


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """Result of one batch at one stage.

    Attributes:
        states: States that changed, by key, with the version that was loaded.
        decided: One per arrival, in the order of arrival.
        retired: Lanes retired to their floor.
        failed: Records that could not be folded, or must not be.
        rejected: Of a filter: the arrivals that it rejects, by number, with the cause. They leave no hole.
        warnings: Of a filter: signs that it is used wrongly.
    """

    states: Mapping[bytes, KeyState]
    decided: Sequence[Decided]
    retired: int = 0
    failed: Collection[Node] = ()
    rejected: Mapping[int, Cause] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def verdicts(self) -> Counter[str]:
        """Number of arrivals per verdict; elements that only pass through have none."""
        return Counter(one.decision.verdict.value for one in self.decided if not one.arrival.transit)

    @property
    def keyless(self) -> int:
        """Number of arrivals on lanes that lead through records without a key."""
        return sum(one.arrival.standing.wide for one in self.decided)


def fold_stage(
    stage: Aggregate,
    loaded: Mapping[bytes, KeyState],
    arrivals: Sequence[Arrival],
    *,
    batch: int,
    siblings: SiblingPolicy = Siblings.EVENT_ID,
    excluded: Mapping[Node, Cause] | None = None,
    evict: bool = True,
    replays: bool = False,
    types: Schema = UNKNOWN,
    holes: bool = True,
    removed: int | None = None,
    waiting: Waiting = frozenset(),
) -> StageOutcome:
    """Judge and fold one batch.

    All elements of one record are one collection: if one of them cannot be folded, none is, and each
    leaves a hole in the state of its key. Keys of a failed collection are therefore folded again without it.

    Args:
        stage: The stage.
        loaded: States by key; keys without a state may be missing.
        arrivals: The batch, in order of arrival.
        batch: Number of the batch, for the age of lanes.
        siblings: Policy for equal positions without index and id.
        excluded: Records that must not be folded, with the cause: a sibling failed elsewhere.
        evict: False while the consumed topic grows; see `Histories.folding`.
        replays: A crashed run may have folded the next messages; see `Histories.folding`.
        types: See `aggregations.per_message.emitting.emitted_types`.
        holes: A failed element leaves a hole under its key. Not where the key may be another one when it is redriven.
        removed: Due time up to which states of the stage, and sessions in them, have left, in seconds since 1970.
        waiting: What the ledger lists at later stages.

    Raises:
        GrowthFullError: A key has more positions than a state remembers while the topic grows.
        HolesFullError: A key has reached the limit of dead letters that wait for a redrive.
    """
    by_key: dict[bytes, list[int]] = defaultdict(list)
    by_record: dict[Node, list[int]] = defaultdict(list)
    copies: dict[tuple[bytes, str, Position], list[int]] = defaultdict(list)
    for i, arrival in enumerate(arrivals):
        if not arrival.transit:
            by_key[arrival.key].append(i)
            by_record[arrival.element.own].append(i)
            standing = arrival.standing
            if standing.route is Route.COPY:
                copies[arrival.key, standing.group, standing.position].append(i)
    failed = {own: cause for own, cause in (excluded or {}).items() if own in by_record}
    arrivals = list(arrivals)
    for own in failed:
        _accept_copies(arrivals, copies, by_record[own])
    results: dict[bytes, _Folded] = {}
    # In an order that depends only on the batch: it may decide which of two records fails.
    todo = dict.fromkeys(sorted(by_key))
    while todo:
        key = next(iter(todo))
        del todo[key]
        rows = [i for i in by_key[key] if arrivals[i].element.own not in failed]
        again = key in results
        before = loaded.get(key, KeyState())
        result = _fold_key(
            *(stage, before, arrivals, rows, batch, siblings, types, removed, waiting),
            careful=again,
            evict=evict,
            replays=replays,
        )
        results[key] = result
        for i, cause in result.failures:
            own = arrivals[i].element.own
            if own not in failed:
                failed[own] = cause
                _accept_copies(arrivals, copies, by_record[own])
                todo |= dict.fromkeys(arrivals[sibling].key for sibling in by_record[own])
    passing = {i: _pass(stage, loaded, one, types) for i, one in enumerate(arrivals) if one.transit}
    return _outcome(stage, arrivals, results, loaded, failed, by_record, siblings, passing, holes=holes)


def _accept_copies(
    arrivals: list[Arrival], copies: Mapping[tuple[bytes, str, Position], Sequence[int]], died: Sequence[int]
) -> None:
    """Accept redriven copies that arrive in the same batch in which their record is rejected."""
    for i in died:
        dead = arrivals[i]
        for j in copies.get((dead.key, dead.standing.group, dead.standing.position), ()):
            one = arrivals[j].standing
            if one.route is Route.COPY:
                route = Route.DEAD_LETTER if dead.element.again else Route.MISSING
                arrivals[j] = replace(arrivals[j], standing=replace(one, route=route))


@dataclass(slots=True)
class _Folded:
    """One key after one attempt; its state is None when it did not change."""

    state: KeyState | None = None
    decisions: dict[int, Decision] = field(default_factory=dict)
    emitted: dict[int, tuple[Element[Any], ...]] = field(default_factory=dict)
    failures: list[tuple[int, Cause]] = field(default_factory=list)
    retired: int = 0


def _fold_key(
    stage: Aggregate,
    before: KeyState,
    arrivals: Sequence[Arrival],
    rows: Sequence[int],
    batch: int,
    siblings: SiblingPolicy,
    types: Schema,
    removed: int | None,
    waiting: Waiting,
    *,
    careful: bool,
    evict: bool,
    replays: bool,
) -> _Folded:
    """Fold one key; when `careful`, continue after a failure to find all failures."""
    closed, rows = [i for i in rows if arrivals[i].closed], [i for i in rows if not arrivals[i].closed]
    standings = [arrivals[i].standing for i in rows]
    policies = siblings if isinstance(siblings, Siblings) else [siblings[arrivals[i].element.topic] for i in rows]
    decided = before.histories.judge(standings, policies)
    # The fold may change its state in place, and a key may be folded again.
    state = copied(before.fold if before.folded else stage.zero())
    if stage.sessions is not None:
        state = remaining(state, removed)
    result = _Folded()
    folded: list[Standing] = []
    waits: list[tuple[Arrival, Any]] = []
    room, time_us = Room(before.histories), before.time_us
    order = in_order(standings)
    if stage.expiry is not None:
        # In the order of their partition's log, whatever their lanes: it must not matter where a batch ends.
        order.sort(key=lambda place: arrivals[rows[place]].reached_us or 0)
    for place in order:
        i, decision = rows[place], decided[place]
        arrival = arrivals[i]
        if decision.fold and arrival.incarnation is not None and decision.verdict in _FIRST_SEEN:
            decision = Decision(arrival.incarnation, fold=True)
        result.decisions[i] = decision
        if not decision.fold:
            continue
        if (full := room.take(arrival.standing)) is not None:
            result.failures.append((i, Cause(*full)))
            if not careful:
                break
            continue
        kept = copied(state) if careful else None
        try:
            base = copied(stage.fold.zero()) if has_expired(stage, time_us, arrival) else state
            if arrival.waits:
                waits.append((arrival, copied(base)))
            state, emitted = fold_one(stage, base, arrival, types)
        except Exception as error:  # user code may raise anything
            result.failures.append((i, _cause(stage, error)))
            if not careful:
                break
            state = kept
            waits = [one for one in waits if one[0] is not arrival]
            continue
        if decision.verdict is Verdict.REDRIVEN:
            late = passed_on(arrival.standing.route, arrival.redriven)
            emitted = tuple(replace(element, route=late) for element in emitted)
        time_us = latest(time_us, arrival.time_us)
        result.emitted[i] = emitted
        folded.append(arrival.standing)
    taken = {(one.group, one.position) for one in folded}
    result.decisions |= {i: judge_closed(stage, before.histories, arrivals[i], taken) for i in closed}
    if folded:
        try:
            histories, retired = before.histories.folding(
                folded, size=stage.history, lanes=stage.lanes, batch=batch, evict=evict, replays=replays
            )
        except GrowthFullError as error:
            own = arrivals[rows[0]].element.own
            raise GrowthFullError(f"stage {stage.name}, {own}: {error} (--accept growth-full)") from None
        kept_us = None if stage.expiry is None else time_us
        kept_states = keeping(before.kept, waits, waiting) if waits or before.kept else {}
        result.state = KeyState(state, histories, before.version, kept_us, before.hole_us, kept_states)
        result.retired = len(retired)
    return result


def _pass(stage: Aggregate, loaded: Mapping[bytes, KeyState], arrival: Arrival, types: Schema) -> Decided:
    """Pass on a redriven record that this stage already holds."""
    state = loaded.get(arrival.key, KeyState())
    try:
        emitted = passed_again(stage, state.fold, state.kept, arrival, types)
    except Exception as error:  # user code may raise anything
        return Decided.rejected(arrival, _cause(stage, error))
    return Decided(arrival, Decision(Verdict.REDRIVEN, fold=False), emitted=emitted)


def _cause(stage: Aggregate, error: Exception) -> Cause:
    return Cause.of(refusal(error, Reason.FOLD_FAILED, f"the fold of stage {stage.name}"))


def _outcome(
    stage: Aggregate,
    arrivals: Sequence[Arrival],
    results: Mapping[bytes, _Folded],
    loaded: Mapping[bytes, KeyState],
    failed: Mapping[Node, Cause],
    by_record: Mapping[Node, Sequence[int]],
    siblings: SiblingPolicy,
    passing: Mapping[int, Decided],
    *,
    holes: bool,
) -> StageOutcome:
    states = {key: result.state for key, result in results.items() if result.state is not None}
    rejected: dict[int, Cause] = {}
    decisions = {i: decision for result in results.values() for i, decision in result.decisions.items()}
    taken = taken_by(arrivals, decisions) if failed else frozenset()
    for own, cause in failed.items():
        for i in by_record[own]:
            key, standing = arrivals[i].key, arrivals[i].standing
            before = loaded.get(key, KeyState())
            if arrivals[i].closed:
                # It is never folded, so it needs no hole.
                mine = {(group, position) for state, group, position in taken if state == key}
                decisions[i] = judge_closed(stage, before.histories, arrivals[i], mine)
                continue
            if (key, standing.group, standing.position) in taken:
                # A copy of it was folded in this batch. A hole would accept a third copy, below the floor.
                verdict = Verdict.AMBIGUOUS if standing.ambiguous else Verdict.DUPLICATE_IN_BATCH
                decisions[i] = Decision(verdict, fold=False)
                if verdict is Verdict.AMBIGUOUS and siblings_of(siblings, own.topic) is Siblings.GROUP:
                    rejected[i] = cause
                continue
            [decisions[i]] = before.histories.judge([standing])  # alone it has no siblings
            if not decisions[i].fold:
                # Already held, so it needs no hole: an earlier copy of the record was folded as a whole.
                continue
            rejected[i] = cause
            if not holes:
                continue
            state = states.get(key, before)
            try:
                states[key] = replace(state, histories=state.histories.leaving_hole(standing))
                if stage.renewed is not None:
                    states[key] = replace(states[key], hole_us=latest(state.hole_us, arrivals[i].time_us))
            except HolesFullError as error:
                raise HolesFullError(
                    f"stage {stage.name}, {own} ({cause.reason.value}: {cause.raised or cause.detail}): {error} "
                    "(fix the flow and start it again, or discard dead letters with `headwater discard`)"
                ) from None
    decided = []
    for i, arrival in enumerate(arrivals):
        if i in passing:
            decided.append(passing[i])
            continue
        if i in rejected:
            decided.append(Decided.rejected(arrival, rejected[i], holds=holes))
            continue
        decision, died = decisions[i], arrival.element.own in failed
        reason, detail = reason_of(stage, decision.verdict, failed=died)
        emitted = results[arrival.key].emitted.get(i, ())
        decided.append(Decided(arrival, decision, reason, detail, emitted, died=died))
    return StageOutcome(states, decided, sum(result.retired for result in results.values()), failed.keys())

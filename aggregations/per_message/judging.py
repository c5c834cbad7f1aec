"""One stage that is a filter, message by message. Pure; the reference for the vectorised path.

Positions are judged as in every stage: a replay, or a copy with the same lineage, is dropped before the filter sees it.
Everything else of a state is judged by the filter in the order in which it was read, and its position is remembered,
whether it is passed on or not. What the filter rejects is listed in the ledger, not as a hole: a state of a filter may
be that of a whole partition, and has no room for all of its dead letters.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from aggregations.definition.element import Element
from aggregations.definition.inputs import SiblingPolicy
from aggregations.definition.judging import Judging
from aggregations.definition.operators import Aggregate
from aggregations.per_message.arrivals import Arrival, passed_on
from aggregations.per_message.cause import Cause
from aggregations.per_message.stage import Decided, KeyState, StageOutcome
from envelope import Decision, EnvelopeError, Histories, Position, Reason, Route, Siblings, Standing, Verdict
from envelope.dedup.eviction import GrowthFullError
from envelope.dedup.room import Room
from envelope.filters.arrival import DUPLICATE, UNIDENTIFIED, Filter, Ruling, judge_late, rejected, resting, tracking
from envelope.filters.turns import in_turns

_FIRST_SEEN: Final = frozenset({Verdict.ACCEPTED, Verdict.LATE, Verdict.NEW_LANE})


@dataclass(slots=True)
class _Judged:
    """One key after the batch; its state is None when it did not change."""

    state: KeyState | None = None
    decisions: dict[int, Decision] = field(default_factory=dict)
    emitted: dict[int, tuple[Element[Any], ...]] = field(default_factory=dict)
    rejected: dict[int, Cause] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    retired: int = 0


def judge_stage(
    stage: Aggregate,
    loaded: Mapping[bytes, KeyState],
    arrivals: Sequence[Arrival],
    *,
    batch: int,
    siblings: SiblingPolicy = Siblings.EVENT_ID,
    evict: bool = True,
    replays: bool = False,
    subjects: Sequence[Any] | None = None,
    missing: int = 0,
) -> StageOutcome:
    """Judge one batch.

    Args:
        stage: The stage; its fold is a `Judging`.
        loaded: States by key; keys without a state may be missing.
        arrivals: The batch.
        batch: Number of the batch, for the age of lanes.
        siblings: Policy for equal positions without index and id.
        evict: False while the consumed topic grows; see `Histories.folding`.
        replays: A crashed run may have folded the next messages; see `Histories.folding`.
        subjects: What the filter judges for each arrival; the elements when None.
        missing: Number of listed dead letters that may still come to the filter.

    Raises:
        GrowthFullError: A key has more positions than a state remembers while the topic grows.
    """
    judged = [one.element for one in arrivals] if subjects is None else subjects
    by_key: dict[bytes, list[int]] = defaultdict(list)
    passing: dict[int, Decided] = {}
    for i, arrival in enumerate(arrivals):
        if arrival.transit:  # redriven to a later stage, and held here
            emitted = () if arrival.sibling else (arrival.element,)
            passing[i] = Decided(arrival, Decision(Verdict.REDRIVEN, fold=False), emitted=emitted)
        else:
            by_key[arrival.key].append(i)
    found: dict[bytes, _Judged] = {}
    for key, arrived in sorted(by_key.items()):
        # In this order, as in every runner: if partitions were added, a key's later records are in a partition of a higher
        # number.
        rows = sorted(arrived, key=lambda i: (judged[i].partition, judged[i].offset))
        if isinstance(stage.fold, Judging) and stage.fold.spans:
            turns = in_turns([judged[i] for i in rows], stage.fold.time)
            rows = [rows[turn] for turn in turns]
        policies = siblings if isinstance(siblings, Siblings) else [siblings[arrivals[i].element.topic] for i in rows]
        try:
            found[key] = _judge_key(
                stage,
                loaded.get(key, KeyState()),
                {i: arrivals[i] for i in rows},
                {i: judged[i] for i in rows},
                policies,
                batch=batch,
                evict=evict,
                replays=replays,
                missing=missing,
            )
        except GrowthFullError as error:
            own = arrivals[rows[0]].element.own
            raise GrowthFullError(f"stage {stage.name}, {own}: {error} (--accept growth-full)") from None
    decided = []
    for i, arrival in enumerate(arrivals):
        if i in passing:
            decided.append(passing[i])
            continue
        mine = found[arrival.key]
        decision = mine.decisions[i]
        reason = Reason.UNPROVEN if decision.verdict is Verdict.UNPROVEN else None
        decided.append(Decided(arrival, decision, reason, emitted=mine.emitted.get(i, ())))
    return StageOutcome(
        {key: one.state for key, one in found.items() if one.state is not None},
        decided,
        sum(one.retired for one in found.values()),
        rejected={i: cause for one in found.values() for i, cause in one.rejected.items()},
        warnings=[text for one in found.values() for text in one.warnings],
    )


def _judge_key(
    stage: Aggregate,
    before: KeyState,
    arrivals: Mapping[int, Arrival],
    subjects: Mapping[int, Any],
    siblings: Siblings | Sequence[Siblings],
    *,
    batch: int,
    evict: bool,
    replays: bool,
    missing: int,
) -> _Judged:
    """Judge one key; its arrivals are in the order in which they are judged."""
    assert isinstance(stage.fold, Judging)
    rule: Filter[Any] = stage.fold.rule
    standings = [one.standing for one in arrivals.values()]
    # Of copies on several lanes the filter judges the first one: a later one would be out of order.
    decisions = dict(zip(arrivals, before.histories.judge(standings, siblings, by_lane=False), strict=True))
    state = tracking(rule, rule.load(before.fold) if before.folded else rule.zero(), on=missing > 0)
    unjudged, found, folded = stage.fold.unjudged, _Judged(), list[Standing]()
    taken, refused = set[tuple[str, Position]](), set[tuple[str, Position]]()
    room = Room(before.histories)

    def judge(i: int, decision: Decision) -> None:
        nonlocal state
        arrival, standing = arrivals[i], arrivals[i].standing
        back = arrival.redriven
        late = decision.verdict is Verdict.REDRIVEN and not _is_in_place(arrival)
        if (full := room.take(standing)) is not None:
            ruling = Ruling(Verdict.REJECTED, forward=False, reason=full[0], detail=full[1])
        elif subjects[i].topic in unjudged:
            ruling = UNIDENTIFIED
        else:
            asserted = back is not None and back.redrive.asserted
            ruling, state = ruled(rule, state, subjects[i], late=late, asserted=asserted)
        if ruling.warning:
            found.warnings.append(ruling.warning)
        if ruling.verdict is Verdict.REJECTED:
            assert ruling.reason is not None
            found.rejected[i] = Cause(ruling.reason, ruling.detail)
            found.decisions[i] = Decision(Verdict.REJECTED, fold=False)
            refused.add((standing.group, standing.position))
            return
        found.decisions[i] = Decision(verdict_of(decision.verdict, ruling, arrival.incarnation), fold=True)
        if ruling.forward:
            element = arrival.element
            if decision.verdict is Verdict.REDRIVEN:
                element = replace(element, route=passed_on(standing.route, back))
            found.emitted[i] = (element,)
        folded.append(standing)
        taken.add((standing.group, standing.position))

    for i, decision in decisions.items():
        standing = arrivals[i].standing
        at = (standing.group, standing.position)
        if decision.fold and _was_rejected(arrivals[i], before.histories):
            found.decisions[i] = Decision(Verdict.BELOW_FLOOR, fold=False)
        elif decision.fold:
            judge(i, decision)
        elif decision.verdict is Verdict.DUPLICATE_IN_BATCH and at in refused and at not in taken:
            # It is no copy of what was passed on: the filter rejected the one before.
            [alone] = before.histories.judge([standing])
            judge(i, alone)
        else:
            found.decisions[i] = decision
    if folded:
        histories, retired = before.histories.folding(
            folded, size=stage.history, lanes=stage.lanes, batch=batch, evict=evict, replays=replays
        )
        settled = {entry for i, one in found.decisions.items() if one.fold for entry in arrivals[i].entries}
        state = resting(rule, tracking(rule, state, on=missing > len(settled)))
        found.state, found.retired = KeyState(rule.dump(state), histories, before.version), len(retired)
    return found


def _is_in_place(arrival: Arrival) -> bool:
    """Whether an arrival that is listed is the rejected record itself, read again after its batch was not written."""
    plain = arrival.redriven is None and arrival.element.route is Route.PLAIN
    return plain and (len(arrival.standing.position) == 1 or not arrival.element.again)


def _was_rejected(arrival: Arrival, histories: Histories) -> bool:
    """Whether an attempt that crashed has judged an arrival and rejected it: its state holds later positions, and not this.

    Judged again by the state as it is now, it might be passed on, or fence later messages. Positions without a chain are
    offsets of the log, and arrive in their order.
    """
    standing = arrival.standing
    if arrival.redriven is not None or arrival.element.route is not Route.PLAIN or len(standing.position) > 1:
        return False
    history = histories.lanes.get(standing.lane)
    return history is not None and history.highest is not None and standing.position < history.highest


def ruled(
    rule: Filter[Any], state: Any, subject: Any, *, scoped: bool = False, late: bool = False, asserted: bool = False
) -> tuple[Ruling, Any]:
    """The ruling of a filter on an element, and the next state of its scope.

    Args:
        rule: The filter.
        state: The state of the element's scope.
        subject: The element.
        scoped: Every element has a scope.
        late: The element was missing at its place, as a dead letter.
        asserted: The operator asserts that no other element with its identity was passed on.
    """
    try:
        if not scoped and rule.scope(subject) is None:
            return UNIDENTIFIED, state
        ruling, state = judge_late(rule, state, subject, asserted=asserted) if late else rule.judge(state, subject)
    except EnvelopeError as error:
        return rejected(error), state
    # Positions tell what is read again. This is another record, at that offset of a topic that was created again.
    return (DUPLICATE if ruling.verdict is Verdict.REPROCESSED else ruling), state


def verdict_of(position: Verdict, ruling: Ruling, incarnation: Verdict | None = None) -> Verdict:
    """The verdict that is counted: that of the filter, unless it accepts what its position makes special.

    Args:
        position: The verdict on the position; the element is judged by the filter.
        ruling: The filter's ruling.
        incarnation: Verdict when its root topic was created again.
    """
    if ruling.verdict is Verdict.ACCEPTED or (position is Verdict.REDRIVEN and ruling.forward):
        found = position
    else:
        found = ruling.verdict
    return incarnation if incarnation is not None and found in _FIRST_SEEN else found

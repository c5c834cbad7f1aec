"""What became of an element at a stage: what the history of its state, and what else is known, shows."""

from typing import Final, NamedTuple

from aggregations.definition.flow import Stage
from aggregations.definition.inputs import SiblingPolicy, siblings_of
from aggregations.definition.sessions import SessionWindow
from aggregations.per_message.arrivals import Arrival
from aggregations.per_message.stage import KeyState
from envelope import Histories, Reason, Standing, Verdict
from envelope.dedup.lanes import group_of, healed_lane
from jobs.explaining.evidence import Evidence
from jobs.explaining.outcome import AtStage, Outcome
from jobs.tracing import Place

_HELD: Final = (Verdict.DUPLICATE, Verdict.BELOW_FLOOR)
"""Verdicts also of a record that an earlier attempt at its batch had folded."""
_FOLDED: Final = (*_HELD, Verdict.AMBIGUOUS, Verdict.COPY)
"""Verdicts of a record now that was folded: its position is held, or below the floor."""
_BY_JOURNAL: Final = (Outcome.FOLDED, Outcome.DROPPED, Outcome.UNDECIDED)
"""Outcomes of a record for which the journal is asked."""


class _Found(NamedTuple):
    outcome: Outcome
    why: str
    verdict: Verdict | None = None
    waits: bool = False
    reason: Reason | None = None
    earlier: Place | None = None


def at_stage(
    stage: Stage, arrival: Arrival, state: KeyState, siblings: SiblingPolicy, evidence: Evidence, closed_us: int | None
) -> AtStage:
    """What became of an arrival.

    Args:
        stage: The stage.
        arrival: The arrival.
        state: The state of its key now; an empty one if there is none.
        siblings: Policy for equal positions without index and id.
        evidence: What else is known about its record.
        closed_us: The event time up to which windows are closed for it; None if there is none.
    """
    standing, histories = arrival.standing, state.histories
    found = _decide(stage, arrival, state, siblings, evidence, closed_us)
    noted = evidence.journaled
    batch = None if noted is None else noted.batch
    if batch is None and found.outcome is Outcome.FOLDED and (used := _used(histories, standing)):
        batch = evidence.by_batch(used)
    why, reason = found.why, found.reason
    if evidence.unlisted and found.outcome in _BY_JOURNAL:
        why += f"; {evidence.unlisted}"
    if found.outcome is Outcome.DEAD_LETTER and reason is None:
        reasons = [one.facts.reason for one in evidence.letters if one.facts and one.facts.stage == stage.name]
        reason = reasons[0] if reasons else None
    return AtStage(
        stage.name,
        found.outcome,
        why,
        arrival.key,
        arrival.element.indices,
        found.verdict,
        reason,
        batch,
        state.version,
        found.waits,
        found.earlier,
    )


def _decide(
    stage: Stage, arrival: Arrival, state: KeyState, siblings: SiblingPolicy, evidence: Evidence, closed_us: int | None
) -> _Found:
    standing, histories = arrival.standing, state.histories
    if standing.position in histories.holes.get(standing.group, ()):
        return _Found(Outcome.DEAD_LETTER, "its position is a hole in the state, which waits for it", waits=True)
    if arrival.entries:
        return _Found(Outcome.DEAD_LETTER, "the ledger lists it as a dead letter", waits=True)
    [decision] = histories.judge([standing], siblings_of(siblings, arrival.element.topic))
    noted = evidence.journaled
    # A record has one entry, and a flat-map makes several elements of it.
    if noted is not None and not arrival.element.indices and not evidence.letters:
        verdict = noted.verdict(stage.name)
        if verdict is not None and not (noted.entry.again and verdict in _HELD):
            by = "" if evidence.taken_by is None else f"; {evidence.taken_by.place} is the same event and came first"
            return _Found(Outcome.DROPPED, f"the journal lists it{by}", verdict)
        if verdict is None and noted.is_whole(stage.name) and decision.verdict in _FOLDED:
            return _Found(Outcome.FOLDED, "the journal does not list it among what was dropped")
    is_filter = stage.aggregate.rule is not None
    match decision.verdict:
        case Verdict.DUPLICATE | Verdict.AMBIGUOUS | Verdict.BELOW_FLOOR if is_filter and evidence.taken_by is None:
            return _judged(stage, evidence)
        case Verdict.DUPLICATE | Verdict.AMBIGUOUS:
            return _held(stage, arrival, histories, evidence)
        case Verdict.COPY if not arrival.mine:
            return _Found(Outcome.DROPPED, "it was redriven, and this flow did not reject its record", Verdict.COPY)
        case Verdict.BELOW_FLOOR | Verdict.UNPROVEN | Verdict.COPY:
            if _rejected_here(stage, evidence):
                return _Found(Outcome.DEAD_LETTER, "it is in the dead-letter topic")
            return _below(evidence)
    return _absent(stage, arrival, state, evidence, closed_us)


def _held(stage: Stage, arrival: Arrival, histories: Histories, evidence: Evidence) -> _Found:
    """The state holds the position."""
    standing = arrival.standing
    if evidence.taken_by is not None:
        return _Found(Outcome.DROPPED, f"{evidence.taken_by.place} is the same event and came first", Verdict.DUPLICATE)
    if _rejected_here(stage, evidence) and evidence.given_up:
        return _Found(Outcome.DEAD_LETTER, "it was discarded: its position counts as folded")
    lanes = [histories.lanes.get(lane) for lane in (standing.lane, healed_lane(standing.group))]
    others = [copy for copy in evidence.copies if copy.letter is None]
    if not any(history is not None and history.holds(standing.position) for history in lanes):
        by = others[0].place if others else "another record"
        return _Found(Outcome.DROPPED, f"{by} is the same event, on another lane", Verdict.DUPLICATE)
    why = "the state holds its position"
    if _rejected_here(stage, evidence):
        why += "; its dead letter is no longer missing"
    elif others and others[0].place.partition != arrival.element.partition:
        why += f"; {others[0].place} is the same event, and the one that was read first is folded"
    elif not evidence.is_whole:
        why += f"; no other record of its event is among the {evidence.searched:,} offsets before it"
    return _Found(Outcome.FOLDED, why)


def _judged(stage: Stage, evidence: Evidence) -> _Found:
    """A filter has judged the record: the position is held, or below the floor, whatever the filter decided."""
    judged = evidence.filtered.get(stage.name)
    if _rejected_here(stage, evidence):
        if judged is not None and judged.cause is not None and evidence.given_up:
            return _Found(Outcome.DEAD_LETTER, "it is in the dead-letter topic")
        return _Found(Outcome.UNDECIDED, "the filter has judged it again since it was redriven")
    if judged is None or judged.cause is not None:
        return _Found(Outcome.UNDECIDED, "the filter has judged it; its state does not show how")
    if judged.forward and judged.exact:
        return _Found(Outcome.FOLDED, "the filter passed it on")
    before = "" if judged.exact else f" among the {evidence.searched:,} offsets before it"
    if judged.forward:
        return _Found(Outcome.UNDECIDED, f"nothing{before} makes the filter drop it")
    why = "the filter drops it" if judged.earlier is None else f"the filter drops it because of {judged.earlier}"
    if judged.exact:
        return _Found(Outcome.DROPPED, why, judged.verdict, earlier=judged.earlier)
    return _Found(
        Outcome.UNDECIDED, f"{why}, or of a record that was not searched", judged.verdict, earlier=judged.earlier
    )


def _below(evidence: Evidence) -> _Found:
    """The position is at or below the floor."""
    if evidence.taken_by is not None:
        return _Found(
            Outcome.DROPPED, f"{evidence.taken_by.place} is the same event and came first", Verdict.BELOW_FLOOR
        )
    if evidence.is_first:
        return _Found(
            Outcome.FOLDED,
            "it is below the floor of the history, and came first and in order: all records before it were searched",
        )
    return _Found(
        Outcome.UNDECIDED,
        f"it is at or below the floor of the history; among the {evidence.searched:,} offsets before it is no record of its "
        "event",
    )


def _absent(stage: Stage, arrival: Arrival, state: KeyState, evidence: Evidence, closed_us: int | None) -> _Found:
    """The state does not hold the position, which is above the floor, or has no history of the lane."""
    judged = evidence.filtered.get(stage.name)
    if judged is not None and judged.cause is not None:
        return _Found(Outcome.DEAD_LETTER, f"the filter rejects it: {judged.cause.detail}", reason=judged.cause.reason)
    if _rejected_here(stage, evidence):
        return _Found(Outcome.DEAD_LETTER, "it is in the dead-letter topic, and left no hole")
    closes_us = _closes_us(stage, arrival)
    if closes_us is not None and closed_us is not None and closed_us >= closes_us:
        if state.version:
            return _Found(
                Outcome.DROPPED, "its window is closed, and the state does not hold it", Verdict.WINDOW_CLOSED
            )
        return _Found(Outcome.UNDECIDED, "its window is closed, and has no state")
    expiry, time_us = stage.aggregate.expiry, arrival.time_us
    if expiry and time_us is not None and closed_us is not None and expiry.ends_us(time_us) <= closed_us:
        return _Found(Outcome.UNDECIDED, "the state that may have held it has expired")
    if not state.version:
        return _Found(Outcome.MISSING, "the store has no state of its key")
    return _Found(Outcome.MISSING, "the state of its key does not hold its position")


def _closes_us(stage: Stage, arrival: Arrival) -> int | None:
    """Event time at which the window of an arrival closes, in microseconds since 1970; None without windows."""
    window, time_us = stage.aggregate.window, arrival.element.time_us
    if window is None or time_us is None:
        return None
    if isinstance(window, SessionWindow):
        return window.closes_us(time_us)
    return window.closes_us(int(window.split(arrival.key).start.timestamp()))


def _rejected_here(stage: Stage, evidence: Evidence) -> bool:
    return any(one.facts is not None and one.facts.stage in ("", stage.name) for one in evidence.letters)


def _used(histories: Histories, standing: Standing) -> int:
    """The batch that last added to the lane that holds a position; 0 if none does."""
    own = histories.lanes.get(standing.lane)
    if own is not None and own.holds(standing.position):
        return own.used
    return max(
        (
            history.used
            for lane, history in histories.lanes.items()
            if group_of(lane.removeprefix("!")) == standing.group and history.holds(standing.position)
        ),
        default=0,
    )

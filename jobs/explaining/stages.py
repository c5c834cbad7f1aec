"""What became of an element at a stage: what the history of its state, and what else is known, shows."""

from typing import Final, NamedTuple

from aggregations.definition.flow import Stage
from aggregations.per_message.arrivals import Arrival
from aggregations.per_message.closed import judge_closed, reason_of
from aggregations.per_message.stage import KeyState
from envelope import Decision, Histories, Reason, Siblings, Standing, Verdict
from envelope.dedup.lanes import group_of, healed_lane
from jobs.explaining.copies import Copy
from jobs.explaining.evidence import Evidence
from jobs.explaining.outcome import AtStage, InBatch, Outcome
from jobs.tracing import Place

_HELD: Final = (Verdict.DUPLICATE, Verdict.AMBIGUOUS, Verdict.BELOW_FLOOR)
"""Verdicts also of a record that an earlier attempt at its batch had folded."""
_FOLDED: Final = (*_HELD, Verdict.COPY)
"""Verdicts of a record now that was folded: its position is held, or below the floor."""
_FILLED: Final = "its dead letter is no longer missing: the state holds its event"
_BY_JOURNAL: Final = (Outcome.FOLDED, Outcome.DROPPED, Outcome.UNDECIDED)
"""Outcomes of a record for which the journal is asked."""


class Late(NamedTuple):
    """What is known about an arrival that may have come too late, beside the log of its partition before it.

    Attributes:
        possible: It would be too late now.
        shut: It would be too late now if nothing came before it in its partition: the other partitions are further.
        left: Its state has left the store since, if it had one.
    """

    possible: bool = False
    shut: bool = False
    left: bool = False


class _Found(NamedTuple):
    outcome: Outcome
    why: str
    verdict: Verdict | None = None
    waits: bool = False
    reason: Reason | None = None
    earlier: Place | None = None


class AtOneStage(NamedTuple):
    """An arrival at a stage, and what is known about it.

    Attributes:
        stage: The stage.
        arrival: The arrival.
        state: The state of its key now; an empty one if there is none.
        siblings: Policy for equal positions without index and id.
        evidence: What else is known about its record.
        late: What is known about its time.
        emits: An earlier stage whose state decides what arrives here; empty if there is none.
        unsure: It is not known whether an earlier stage has passed it on.
    """

    stage: Stage
    arrival: Arrival
    state: KeyState
    siblings: Siblings
    evidence: Evidence
    late: Late
    emits: str
    unsure: bool

    @property
    def decision(self) -> Decision:
        """What the stage would decide if the arrival came now."""
        if self.arrival.closed:
            return judge_closed(self.stage.aggregate, self.state.histories, self.arrival, ())
        [found] = self.state.histories.judge([self.arrival.standing], self.siblings)
        return found

    @property
    def taken_by(self) -> Copy | None:
        """The earlier record that took its place."""
        return self.evidence.taken_by(self.stage, self.arrival)

    @property
    def is_grouped(self) -> bool:
        """Whether nothing tells it from its siblings, and those of one batch are folded."""
        return self.arrival.standing.ambiguous and self.siblings is Siblings.GROUP

    def is_apart(self, copy: Copy) -> bool:
        """Whether another record of its event is on another lane."""
        return self.evidence.is_apart(copy, self.stage, self.arrival)

    @property
    def is_rejected(self) -> bool:
        """Whether it became a dead letter here."""
        return self.evidence.rejected_at(self.stage, self.arrival) is not None


def at_stage(case: AtOneStage) -> AtStage:
    """What became of an arrival."""
    arrival, evidence = case.arrival, case.evidence
    found = _decide(case)
    why, reason = found.why, found.reason
    if evidence.unlisted and found.outcome in _BY_JOURNAL:
        why += f"; {evidence.unlisted}"
    letter = evidence.rejected_at(case.stage, arrival)
    if found.outcome is Outcome.DEAD_LETTER and reason is None and letter is not None and letter.facts is not None:
        reason = letter.facts.reason
    return AtStage(
        case.stage.name,
        found.outcome,
        why,
        arrival.key,
        arrival.element.indices,
        found.verdict,
        reason,
        _batch(case, found),
        case.state.version,
        found.waits,
        found.earlier,
    )


def _batch(case: AtOneStage, found: _Found) -> InBatch | None:
    """The batch that read an arrival, or the last one that may have folded it; None if it is not known."""
    if (noted := case.evidence.journaled) is not None:
        return noted.batch
    used = _used(case.state.histories, case.arrival.standing) if found.outcome is Outcome.FOLDED else 0
    return case.evidence.by_batch(used) if used else None


def _decide(case: AtOneStage) -> _Found:
    stage, arrival = case.stage, case.arrival
    standing, decision = arrival.standing, case.decision
    if arrival.closed:
        return _too_late(case, decision)
    if decision.verdict not in (Verdict.DUPLICATE, Verdict.AMBIGUOUS):
        if standing.position in case.state.histories.holes.get(standing.group, ()):
            return _Found(Outcome.DEAD_LETTER, "its position is a hole in the state, which waits for it", waits=True)
        if arrival.entries:
            return _Found(Outcome.DEAD_LETTER, "the ledger lists it as a dead letter", waits=True)
    if (found := _journaled(case, decision)) is not None:
        return found
    is_filter = stage.aggregate.rule is not None
    match decision.verdict:
        case Verdict.DUPLICATE | Verdict.AMBIGUOUS | Verdict.BELOW_FLOOR if is_filter and (
            case.taken_by is None or case.is_grouped
        ):
            return _judged(case)
        case Verdict.DUPLICATE | Verdict.AMBIGUOUS:
            return _held(case, decision.verdict)
        case Verdict.COPY if not arrival.mine:
            return _Found(Outcome.DROPPED, "it was redriven, and this flow did not reject its record", Verdict.COPY)
        case Verdict.BELOW_FLOOR | Verdict.UNPROVEN | Verdict.COPY:
            return _rejected(case) if case.is_rejected else _below(case)
    return _absent(case)


def _journaled(case: AtOneStage, decision: Decision) -> _Found | None:
    """What the journal says; None if it says nothing."""
    stage, evidence, noted = case.stage, case.evidence, case.evidence.journaled
    # A record has one entry, and a flat-map makes several elements of it.
    if noted is None or case.arrival.element.indices or evidence.letters:
        return None
    verdict = noted.verdict(stage.name)
    if verdict is not None and not (noted.entry.again and verdict in _HELD):
        taken = None if decision.verdict is Verdict.AMBIGUOUS else case.taken_by
        by = "" if taken is None else f"; {taken.place} is the same event and came first"
        return _Found(
            Outcome.DROPPED, f"the journal lists it{by}", verdict, earlier=None if taken is None else taken.place
        )
    has_left = case.late.left and evidence.has_letters
    if verdict is None and noted.is_whole(stage.name) and (decision.verdict in _FOLDED or has_left):
        return _Found(Outcome.FOLDED, "the journal does not list it among what was dropped")
    return None


def _too_late(case: AtOneStage, decision: Decision) -> _Found:
    """The log of its partition had closed the arrival's window, or was further than the stage's states last."""
    stage, taken = case.stage, case.taken_by
    if decision.verdict in (Verdict.DUPLICATE, Verdict.AMBIGUOUS, Verdict.COPY):
        by = "another record" if taken is None else str(taken.place)
        earlier = None if taken is None else taken.place
        why = f"{by} is the same event and came first; it came too late itself"
        return _Found(Outcome.DROPPED, why, decision.verdict, earlier=earlier)
    window = stage.aggregate.window is not None
    why = "its window was closed when it was read" if window else "the state that it may belong to had expired"
    return _dropped_late(case, decision.verdict, why)


def _dropped_late(case: AtOneStage, verdict: Verdict, why: str) -> _Found:
    reason, _ = reason_of(case.stage.aggregate, verdict, failed=False)
    if reason is None:
        return _Found(Outcome.DROPPED, why, verdict)
    return _Found(Outcome.DEAD_LETTER, why, waits=bool(case.arrival.entries), reason=reason)


def _held(case: AtOneStage, verdict: Verdict) -> _Found:
    """The state holds the position."""
    standing, evidence, taken = case.arrival.standing, case.evidence, case.taken_by
    others = [copy for copy in evidence.copies if copy.letter is None]
    if case.is_rejected:
        return _rejected(case)
    if evidence.rejected_before(case.stage):
        return _Found(Outcome.FOLDED, _FILLED)
    as_group = case.is_grouped and evidence.in_one_batch and not (evidence.dead.by_place or evidence.filtered)
    if standing.ambiguous and evidence.copies and (case.emits or (case.stage.index and not as_group)):
        other = evidence.copies[0].place
        return _Found(Outcome.UNDECIDED, f"the state has its position, or that of its sibling {other}")
    if case.is_grouped:
        return _grouped(evidence, others)
    if taken is not None:
        return _Found(Outcome.DROPPED, _came_first(case, taken), verdict, earlier=taken.place)
    own, apart = case.arrival.element.partition, [copy for copy in others if case.is_apart(copy)]
    elsewhere = next((copy for copy in others if copy.place.partition != own and copy not in apart), None)
    lanes = [case.state.histories.lanes.get(lane) for lane in (standing.lane, healed_lane(standing.group))]
    if not any(history is not None and history.holds(standing.position) for history in lanes):
        by = apart[0].place if apart else "another record"
        return _Found(Outcome.DROPPED, f"{by} is the same event, on another lane", verdict)
    why = "the state holds its position"
    if elsewhere is not None:
        why += f"; {elsewhere.place} is the same event, and the one that was read first is folded"
    elif not evidence.is_complete:
        why += unsearched(evidence)
    return _Found(Outcome.FOLDED, why)


def _rejected(case: AtOneStage) -> _Found:
    """It became a dead letter here, and neither a hole nor the ledger waits for it."""
    letter = case.evidence.rejected_at(case.stage, case.arrival)
    facts = None if letter is None else letter.facts
    assert facts is not None
    unlisted = not facts.hole and bool(case.evidence.ledger.forgotten.get(case.stage.name))
    if unlisted or facts.reason is Reason.WINDOW_CLOSED:
        return _Found(Outcome.DEAD_LETTER, "it is in the dead-letter topic")
    if case.evidence.given_up:
        return _Found(Outcome.DEAD_LETTER, "it was discarded: its position counts as folded")
    return _Found(Outcome.FOLDED, _FILLED)


def _came_first(case: AtOneStage, other: Copy) -> str:
    if case.arrival.standing.ambiguous:
        return f"{other.place} has the same position, without an index or an event id, and came first"
    return f"{other.place} is the same event and came first"


def _grouped(evidence: Evidence, others: list[Copy]) -> _Found:
    """Nothing tells it from its siblings: those that one batch reads together are folded, and later ones dropped."""
    if evidence.in_one_batch:
        return _Found(Outcome.FOLDED, "the flow has read its siblings in one batch, and folds them as a group")
    earlier = {copy.place for copy in evidence.earlier}
    before = [one for one in others if one.place in earlier or not evidence.in_order]
    if before:
        why = f"it has the position of {before[0].place}: siblings that one batch reads are folded, and later ones dropped"
        return _Found(Outcome.UNDECIDED, f"{why}; a journal shows the batch")
    return _Found(
        Outcome.FOLDED, "the state holds its position" + ("" if evidence.is_complete else unsearched(evidence))
    )


def unsearched(evidence: Evidence) -> str:
    """What a text adds if the search does not reach back to where the flow began."""
    where = (
        "those searched in other partitions" if evidence.is_whole else f"the {evidence.searched:,} offsets before it"
    )
    return f"; no other record of its event is among {where}"


def _judged(case: AtOneStage) -> _Found:
    """A filter has judged the record: the position is held, or below the floor, whatever the filter decided."""
    evidence = case.evidence
    judged = evidence.filtered.get(case.stage.name)
    if case.is_rejected:
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


def _below(case: AtOneStage) -> _Found:
    """The position is at or below the floor."""
    evidence, taken = case.evidence, case.taken_by
    if taken is not None and case.is_grouped:
        return _grouped(evidence, [taken])
    if taken is not None:
        return _Found(Outcome.DROPPED, _came_first(case, taken), Verdict.BELOW_FLOOR, earlier=taken.place)
    apart = any(map(case.is_apart, evidence.copies))
    unsure = apart or case.late.shut or case.emits or case.unsure or evidence.rejected_before(case.stage)
    if evidence.in_order and not unsure:
        return _Found(
            Outcome.FOLDED,
            "it is below the floor of the history, and came first and in order: all records before it were searched",
        )
    return _Found(
        Outcome.UNDECIDED,
        f"it is at or below the floor of the history; among the {evidence.searched:,} offsets before it is no record of its "
        "event",
    )


def _absent(case: AtOneStage) -> _Found:
    """The state does not hold the position, which is above the floor, or has no history of the lane."""
    stage, late = case.stage, case.late
    judged = case.evidence.filtered.get(stage.name)
    if judged is not None and judged.cause is not None:
        return _Found(Outcome.DEAD_LETTER, f"the filter rejects it: {judged.cause.detail}", reason=judged.cause.reason)
    if case.is_rejected:
        return _Found(Outcome.DEAD_LETTER, "it is in the dead-letter topic, and left no hole")
    if case.evidence.rejected_before(stage):
        return _Found(Outcome.UNDECIDED, "a dead letter before this stage, and what filled its place is not known here")
    if case.emits:
        why = f"stage {case.emits} emits what it makes of its state, which has changed: what arrived here is not known"
        return _Found(Outcome.UNDECIDED, why)
    taken = None if case.is_grouped else case.taken_by
    if late.left and taken is not None:
        return _Found(Outcome.DROPPED, _came_first(case, taken), earlier=taken.place)
    if late.left:
        return _Found(Outcome.UNDECIDED, "the state that may have held it has left the store")
    if late.possible:
        window = stage.aggregate.window is not None
        why = "its window is closed" if window else "its key's state expires"
        verdict = Verdict.WINDOW_CLOSED if window else Verdict.BELOW_FLOOR
        return _dropped_late(case, verdict, f"{why}, and the state does not hold it: it came too late")
    if not case.state.version:
        return _Found(Outcome.MISSING, "the store has no state of its key")
    return _Found(Outcome.MISSING, "the state of its key does not hold its position")


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

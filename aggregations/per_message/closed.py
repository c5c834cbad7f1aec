"""What becomes of a message that comes too late: its window is closed, or its state may have expired."""

from collections.abc import Collection, Mapping, Sequence

from aggregations.definition.operators import Aggregate
from aggregations.definition.windows import Late
from aggregations.per_message.arrivals import Arrival
from envelope import Decision, Histories, Position, Reason, Verdict


def judge_closed(
    stage: Aggregate, before: Histories, arrival: Arrival, taken: Collection[tuple[str, Position]]
) -> Decision:
    """Decide about an arrival that comes too late; only a proven copy has another verdict.

    A dead letter of this stage that is redriven is no copy: its window is closed for it, too. If its state may have
    expired, it is unproven if it had left a hole, which may have left with the state; below the floor if the ledger
    listed it instead, and a copy once it has left the ledger.

    Args:
        stage: The stage.
        before: The histories before the batch.
        arrival: The arrival.
        taken: Group and position of what this batch folds.
    """
    standing = arrival.standing
    [decision] = before.judge([standing])
    if decision.verdict in (Verdict.DUPLICATE, Verdict.AMBIGUOUS):
        return decision
    if (standing.group, standing.position) in taken:
        return Decision(Verdict.DUPLICATE_IN_BATCH, fold=False)
    if decision.verdict is Verdict.COPY and not arrival.mine:
        return decision
    if stage.window is not None:
        return Decision(Verdict.WINDOW_CLOSED, fold=False)
    if arrival.mine and arrival.redriven is not None and arrival.redriven.redrive.hole:
        return Decision(Verdict.UNPROVEN, fold=False)
    return decision if decision.verdict is Verdict.COPY else Decision(Verdict.BELOW_FLOOR, fold=False)


def has_expired(stage: Aggregate, time_us: int | None, arrival: Arrival) -> bool:
    """Whether a state with this latest event time has expired for an arrival, which then begins a new one."""
    if stage.expiry is None or time_us is None or arrival.reached_us is None:
        return False
    return stage.expiry.ends_us(time_us) <= arrival.reached_us


def taken_by(arrivals: Sequence[Arrival], decisions: Mapping[int, Decision]) -> frozenset[tuple[bytes, str, Position]]:
    """Key, group and position of the messages that a batch folds."""
    folded = (arrivals[i] for i, decision in decisions.items() if decision.fold)
    return frozenset((one.key, one.standing.group, one.standing.position) for one in folded)


def reason_of(stage: Aggregate, verdict: Verdict, *, failed: bool) -> tuple[Reason | None, str]:
    """Why a message with this verdict goes to the dead-letter topic; None if it does not.

    An item of a record that failed goes there with the whole record, whatever the verdict on the item.
    """
    if verdict is Verdict.UNPROVEN:
        return Reason.UNPROVEN, ""
    late = stage.window is not None and stage.window.late is Late.DEAD_LETTER
    if verdict is Verdict.WINDOW_CLOSED and late and not failed:
        return Reason.WINDOW_CLOSED, f"its window of stage {stage.name} is closed"
    return None, ""

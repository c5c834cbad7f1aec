"""What becomes of a message whose window is closed."""

from collections.abc import Collection

from aggregations.definition.operators import Aggregate
from aggregations.definition.windows import Late
from aggregations.per_message.arrivals import Arrival
from envelope import Decision, Histories, Position, Reason, Verdict


def judge_closed(before: Histories, arrival: Arrival, taken: Collection[tuple[str, Position]]) -> Decision:
    """Decide about an arrival whose window is closed; only a proven copy has another verdict.

    A dead letter of this stage that is redriven is no copy: its window is closed for it, too.

    Args:
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
    return Decision(Verdict.WINDOW_CLOSED, fold=False)


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

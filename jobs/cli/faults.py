"""`headwater faults`: the points where a fault can be injected, and the outcomes."""

from jobs.cli.options import Json
from jobs.screen import emit, table, write


def faults(json: Json = False) -> None:
    """List the points and outcomes of fault injection.

    HEADWATER_FAULT=POINT.OUTCOME[@N] injects an outcome at the N-th effect of a point; separate several with commas.
    STAGE and STORE stand for a name; a point without a name matches all names.
    """
    from persistence.commit.faults import FaultOutcome, known_points

    points = {str(point): text for point, text in known_points().items()}
    outcomes = {outcome.value: outcome.text for outcome in FaultOutcome}
    if json:
        emit({"points": points, "outcomes": outcomes})
        return
    table(points.items(), ["point", "what happens there"], left=["point", "what happens there"])
    write("")
    table(outcomes.items(), ["outcome", "the effect is"], left=["outcome", "the effect is"])

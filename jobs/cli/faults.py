"""`headwater faults`: where every effect can be made to fail, and how."""

from jobs.cli.options import Json
from jobs.screen import emit, table, write


def faults(json: Json = False) -> None:
    """List the fault points, and the ends that an effect can be given there.

    HEADWATER_FAULT=POINT.OUTCOME[@N] gives the N-th effect at a point that end; several have commas between them. STAGE
    and STORE stand for a name; a point without its name stands for each of its kind.
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

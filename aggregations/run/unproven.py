"""Dead letters that a fold of a flow's history finds unproven, and that the live states may have folded.

A batch is judged by the positions that a state held before it. So a dead letter without a hole may be redriven within a
large batch and folded, while the same history in smaller batches has evicted higher positions by then, and finds it
`unproven`. Where the batches of the live states ended is not known.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from aggregations.definition.flow import Flow, Stage
from aggregations.per_message.ledger import Ledger
from aggregations.report import Report
from envelope import Verdict
from envelope.dedup.lineage import DIED


def stages_up_to(flow: Flow[Any], stage: Stage) -> set[str]:
    """Names of a stage and of those that pass elements on to it."""
    [part] = (one for one in flow.parts if stage.name in one.stage_names)
    return {one.name for one in part.stages if one.index <= stage.index}


def unproven_apart(flow: Flow[Any], stages: Iterable[Stage], live: Ledger, folded: Ledger, report: Report) -> int:
    """Number of messages that a fold finds unproven at some stages or before them, and the live states may have folded.

    An unproven dead letter is listed by its coordinates, and leaves the list when it is folded. So the live ledger
    lacks those that the live states have folded, or that were discarded. Pure.

    Args:
        flow: The flow.
        stages: The stages.
        live: The ledger of the live states.
        folded: The ledger of the fold.
        report: The counts of the fold.
    """
    names = {
        name for stage in stages for name in (*stages_up_to(flow, stage), *(flow.tables if stage.looks_up else ()))
    }
    found = 0
    for stage in names:
        unproven = report.verdicts.get(stage, Counter())[Verdict.UNPROVEN.value]
        apart = len(_by_coordinates(folded, stage) - _by_coordinates(live, stage))
        found += unproven if folded.forgotten.get(stage) else min(unproven, apart)
    return found


def _by_coordinates(ledger: Ledger, stage: str) -> set[tuple[str, object]]:
    groups = ledger.listed.get(stage, {})
    return {(group, at) for group, positions in groups.items() if group.startswith(DIED) for at in positions}

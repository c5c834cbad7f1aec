"""A row of the vectorised path as an arrival of the per-message path."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aggregations.columns import schema
from aggregations.columns.batch import indices_of, redriven, standing
from aggregations.columns.judge import VERDICTS
from aggregations.columns.signature import Signature
from aggregations.columns.steps import FAILURES
from aggregations.definition.element import Element
from aggregations.definition.flow import Stage
from aggregations.definition.inputs import siblings_of
from aggregations.engine.path import Work
from aggregations.engine.rows import BROKEN, INPUT, REKEYED, STAGE_KEY, Rows, times_of
from aggregations.per_message.arrivals import Arrival, in_transit, waits_as
from envelope import EnvelopeError, Route


def arrival_of(work: Work, stage: Stage, rows: Rows, row: Mapping[str, Any]) -> Arrival:
    """An arrival at a stage. Its element has what the stage needs, but no value.

    Args:
        work: Context of the task.
        stage: The stage.
        rows: The arrivals.
        row: One of them.
    """
    signatures, job = rows.signatures, work.job
    signature = signatures[row[schema.SIGNATURE]]
    own = work.node(row)
    verdict = incarnation_of(work, signature)
    names = stage.aggregate.inputs() if rows.values is None else ()
    policy, back = siblings_of(job.flow.siblings, own.topic), redriven(row, signatures)
    at = standing(row, signatures, rekeyed=row[REKEYED], siblings=policy)
    late = Route(row.get(schema.LATE) or Route.PLAIN)
    indices = indices_of(row)
    ledger, later = job.progress.ledger, job.flow.after(stage)
    entries, sibling = ledger.entries(stage.name, own, at, back, indices), False
    route = ledger.route(stage.name, at, back, entries)
    mine = back is not None and ledger.mine(back.redrive)
    transit = back is not None and back.redrive.stage in later and mine and late is Route.PLAIN
    if transit and back is not None:
        entries, sibling = in_transit(ledger, own, at, back, indices)
    element: Element[Any] = Element(
        None,
        row[schema.KEY],
        own,
        event_id=row[schema.EVENT_ID] or "",
        indices=indices,
        again=bool(row.get(schema.AGAIN)),
        route=late,
        time_us=row.get(schema.TIME),
    )
    return Arrival(
        element,
        row[STAGE_KEY],
        replace(at, route=route),
        VERDICTS[verdict] if verdict >= 0 else None,
        EnvelopeError(*FAILURES[row[BROKEN]]) if row[BROKEN] else {name: row[f"{INPUT}{name}"] for name in names},
        transit,
        entries,
        back,
        mine=mine,
        waits=waits_as(ledger.waiting(later), element, at, back) if stage.aggregate.emits_state else (),
        sibling=sibling,
        fixed=stage.fixed(indices),
        **times_of(row),
    )


def incarnation_of(work: Work, signature: Signature) -> int:
    """Number of the verdict for the id of a root topic; -1 for the current id."""
    if signature.cluster != work.job.flow.cluster:
        return -1
    verdict = work.incarnations.verdict(signature.topic, signature.topic_id)
    return -1 if verdict is None else VERDICTS.index(verdict)

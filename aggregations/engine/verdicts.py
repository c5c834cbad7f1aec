"""Counts the verdicts of whole columns, and notes for the journal which records were dropped."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aggregations.columns import schema
from aggregations.columns.arrays import Ints, Mask
from aggregations.columns.judge import VERDICTS
from aggregations.engine.dropped import was_dropped
from aggregations.engine.path import Work
from aggregations.engine.row_arrivals import incarnation_of
from aggregations.engine.rows import Rows
from aggregations.engine.sampling import ALL, partition_number, sampled
from aggregations.per_message.stage import Decided
from envelope import Verdict

_FIRST_SEEN = tuple(VERDICTS.index(one) for one in (Verdict.ACCEPTED, Verdict.LATE, Verdict.NEW_LANE))
_REJECTED = VERDICTS.index(Verdict.REJECTED)


def count_verdicts(
    work: Work, stage: str, rows: Rows, verdicts: npt.NDArray[np.uint8], dropped: Mask, mask: Mask
) -> None:
    """Count the verdicts of some rows; first deliveries of a topic that was created again have their own verdict.

    Args:
        work: Context of the task.
        stage: Name of the stage.
        rows: The rows.
        verdicts: The verdict of each, as its place in `VERDICTS`.
        dropped: Rows that are not passed on.
        mask: The rows to count.
    """
    signature = rows.frame.get_column(schema.SIGNATURE).to_numpy()
    incarnation = np.array([incarnation_of(work, one) for one in rows.signatures], np.int64)[signature]
    named = np.where((incarnation >= 0) & np.isin(verdicts, _FIRST_SEEN), incarnation, verdicts)
    counts = np.bincount(named[mask], minlength=len(VERDICTS))
    mine = work.report.counts.verdicts.setdefault(stage, Counter())
    mine.update({VERDICTS[i].value: int(count) for i, count in enumerate(counts) if count})
    if work.job.options.journal is not None:
        _note(work, stage, rows, verdicts, mask & dropped & (verdicts != _REJECTED))


def note_decided(
    work: Work, stage: str, rows: Rows, at: Ints, decided: Sequence[Decided], *, filters: bool = False
) -> None:
    """Note for the journal which rows the pure code dropped.

    Args:
        work: Context of the task.
        stage: Name of the stage.
        rows: The rows.
        at: Numbers of those that the pure code decided.
        decided: What it decided about each.
        filters: The stage is a filter.
    """
    if work.job.options.journal is not None:
        verdicts, dropped = np.zeros(rows.frame.height, np.uint8), np.zeros(rows.frame.height, np.bool_)
        verdicts[at] = [VERDICTS.index(one.decision.verdict) for one in decided]
        dropped[at] = [was_dropped(one, filters=filters) for one in decided]
        _note(work, stage, rows, verdicts, dropped)


def _note(work: Work, stage: str, rows: Rows, verdicts: npt.NDArray[np.uint8], dropped: Mask) -> None:
    """Note the dropped rows of the events that the journal lists."""
    where = _listed(work.job.options.journal_share, rows, np.flatnonzero(dropped))
    if not len(where):
        return
    frame = rows.frame.select(schema.TOPIC, schema.PARTITION, schema.OFFSET)[where]
    verdicts = verdicts[where]
    partitions = frame.get_column(schema.PARTITION).to_numpy().astype(np.int64)
    offsets, topics = frame.get_column(schema.OFFSET).to_numpy(), frame.get_column(schema.TOPIC)
    for topic in topics.unique(maintain_order=True).to_list():
        of_topic = (topics == topic).to_numpy()
        for verdict in np.flatnonzero(np.bincount(verdicts[of_topic])).tolist():
            mine = of_topic & (verdicts == verdict)
            work.report.dropped.take(stage, VERDICTS[verdict].value, topic, partitions[mine], offsets[mine])


def _listed(share: float, rows: Rows, where: Ints) -> Ints:
    """Those of some rows whose events a journal with this share lists."""
    if share >= ALL or not len(where):
        return where
    partitions = np.array([partition_number(one.topic, one.partition) for one in rows.signatures], np.int64)
    found = rows.frame.select(schema.SIGNATURE, schema.position(0))[where]
    codes, offsets = (found.get_column(name).to_numpy() for name in (schema.SIGNATURE, schema.position(0)))
    return where[sampled(share, partitions[codes], offsets)]

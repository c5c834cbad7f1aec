"""Counts the verdicts of whole columns, and notes for the journal which records were dropped."""

from collections import Counter

import numpy as np
import numpy.typing as npt

from aggregations.columns import schema
from aggregations.columns.arrays import Mask
from aggregations.columns.judge import VERDICTS
from aggregations.engine.path import Work
from aggregations.engine.row_arrivals import incarnation_of
from aggregations.engine.rows import Rows
from envelope import Verdict

_FIRST_SEEN = tuple(VERDICTS.index(one) for one in (Verdict.ACCEPTED, Verdict.LATE, Verdict.NEW_LANE))


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
    if work.job.journaled:
        _note(work, stage, rows, verdicts, mask & dropped)


def _note(work: Work, stage: str, rows: Rows, verdicts: npt.NDArray[np.uint8], dropped: Mask) -> None:
    """Note the dropped rows for the journal."""
    where = np.flatnonzero(dropped)
    if not len(where):
        return
    frame = rows.frame.select(schema.TOPIC, schema.PARTITION, schema.OFFSET)[where]
    verdicts = verdicts[where]
    partitions = frame.get_column(schema.PARTITION).to_numpy().astype(np.int64)
    offsets, topics = frame.get_column(schema.OFFSET).to_numpy(), frame.get_column(schema.TOPIC)
    for topic in topics.unique(maintain_order=True).to_list():
        of_topic = (topics == topic).to_numpy()
        for verdict in np.unique(verdicts[of_topic]).tolist():
            mine = of_topic & (verdicts == verdict)
            work.report.dropped.take(stage, VERDICTS[verdict].value, topic, partitions[mine], offsets[mine])

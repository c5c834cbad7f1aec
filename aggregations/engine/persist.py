"""Persists the states of one stage of a batch."""

from collections.abc import Sequence

from aggregations.definition.flow import Stage
from aggregations.engine.clients import store_of
from aggregations.engine.path import Work
from aggregations.run.retire import with_dues
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.marks import Marks
from persistence.protocol import Write


def persist(work: Work, stage: Stage, writes: Sequence[Write]) -> Marks:
    """Write the states of a stage, after those of all stages downstream of it.

    Args:
        work: Context of the task; its report gets the marks.
        stage: The stage.
        writes: The states; at least one.

    Returns:
        The marks that the store acknowledged.

    Raises:
        StoreWentBack: The store lost acknowledged writes.
    """
    urls, progress = work.job.options.urls, work.job.progress
    with work.timed("persist"):
        marks = effect(
            CommitStep.PERSIST.of(stage.name),
            lambda: store_of(urls[stage.name]).save(
                progress.ref.stage(stage.name),
                with_dues(stage, writes),
                epoch=progress.epoch,
                batch=progress.batch,
                known=progress.known.of(stage.name),
                downstream=progress.known.downstream(stage.name),
            ),
        )
    work.report.marks.append((stage.name, marks))
    return marks

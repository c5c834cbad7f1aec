"""Batches of a run, as tasks get them."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.job import Attempt, Job, RunProgress
from aggregations.engine.options import RunOptions
from aggregations.run.run import Run
from persistence.kafka import KafkaSettings

NOWHERE = KafkaSettings("nowhere:1")


def job_of(flow: Flow[Any], run: Run, topic_ids: Mapping[str, str], **given: Any) -> Job:
    """The next batch of a run, with these fields of its options, its progress and its attempt."""
    options = RunOptions(kafka=NOWHERE, stores=dict(run.urls))
    progress = RunProgress(
        ref=run.ref, epoch=run.epoch, batch=run.batch, known=run.known, topic_ids=dict(topic_ids), ledger=run.ledger
    )
    return changed(Job(flow, options, progress, Attempt()), **given)


def changed(job: Job, **given: Any) -> Job:
    """The same batch with other fields of its options, its progress or its attempt."""
    for part in ("options", "progress", "attempt"):
        value = getattr(job, part)
        mine = {one.name: given.pop(one.name) for one in fields(value) if one.name in given}
        job = replace(job, **{part: replace(value, **mine)})
    assert not given, f"a batch has no {', '.join(given)}"
    return job

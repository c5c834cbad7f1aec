"""What Spark's tasks do, in the order that a shuffle between them enforces.

    read, fold stage 1 | fold stage 2 | ... | fold the last stage, publish, persist it | persist the one before | ...

The first stage is persisted behind a bar even when it is the only one, unless the batch is of one partition: there it
shows whether two partitions had the same key, as after partitions were added to the topic. Then nothing of that key is
written, and the batch is folded again with the first stage behind a shuffle.

A bar is a shuffle: no task behind it begins before every task in front of it is done. States of
all but the last stage therefore wait, as blocks, until every stage behind theirs is persisted:
downstream first, without the driver in between. A task that fails sends its error to all tasks
behind it, and none of them does anything more.

Where items of one record may be folded by different tasks, nothing may leave before all of them are
folded. The chain is then cut in two, and the driver looks in between:

    read, fold stage 1 | ... | fold the last stage || publish | persist the last stage | ...

Where a task behind a shuffle publishes, one task produces the outputs of all, in the order of their positions:

    read, fold stage 1 | ... | fold the last stage | publish | persist the last stage | ...
"""

import gc
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from aggregations.definition.flow import Stage
from aggregations.errors import SharedKeyError
from aggregations.per_message.ledger import UnlistedError
from aggregations.spark.blocks import Block, Kind, pack, route_of, unpack
from aggregations.spark.clients import store_of, topics_of
from aggregations.spark.columnar import ColumnarPath
from aggregations.spark.job import Job, TaskReport, dumps, loads
from aggregations.spark.messages import MessagePath
from aggregations.spark.path import Path, Work
from aggregations.spark.publish import publish
from aggregations.spark.roots import check_source
from envelope import Verdict, position_order
from persistence.commit import faults
from persistence.commit.faults import effect
from persistence.commit.steps import CommitStep
from persistence.protocol import Write

Task = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
UNREAD = ("topic", "timestampType")
"""Columns of Spark's Kafka source that are not sent to a worker: the first is the same in all rows."""


def path_of(job: Job) -> Path:
    """The path that this flow takes."""
    return ColumnarPath() if job.flow.is_columnar else MessagePath()


def reading(job: Job) -> Task:
    """The task at Kafka's side: one topic-partition each."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def act(work: Work) -> list[Block]:
            path = path_of(job)
            first = job.flow.stages[0]
            arrivals = path.read(work, _named(batches, _topic(job)))
            # Now that all rows are here: they are of the topic that the driver means, if it is that one still.
            check_source(topics_of(job.kafka), job.flow, job.topic_ids[_topic(job)])
            if job.folds_while_reading:
                return _fold(work, path, first, arrivals)
            return [*_leave(work), *_send(work, path, first.index, arrivals)]

        yield from _guarded(job, [], act)

    return task


def _named(batches: Iterable[pa.RecordBatch], topic: str) -> Iterator[pa.RecordBatch]:
    """The batches with the column `topic`."""
    for batch in batches:
        yield batch.append_column("topic", pa.repeat(topic, batch.num_rows))


def folding(job: Job, stage: Stage) -> Task:
    """The task of a stage behind a shuffle."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mine, others = _sorted(unpack(batches), Kind.ELEMENTS, stage.index)

        def act(work: Work) -> list[Block]:
            path = path_of(job)
            return _fold(work, path, stage, path.unpack(work, mine))

        yield from _guarded(job, others, act)

    return task


def publishing(job: Job) -> Task:
    """The task that publishes what was held back."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mine, others = _sorted(unpack(batches), Kind.OUTPUTS, 0)

        def act(work: Work) -> list[Block]:
            for payload in mine:
                outputs, dead = loads(payload)
                work.outputs += outputs
                work.collector.take(dead)
            work.outputs.sort(key=lambda output: position_order(output.order))
            with work.timed("publish"):
                publish(work)
            return []

        yield from _guarded(job, others, act)

    return task


def persisting(job: Job, stage: Stage) -> Task:
    """The task that persists a stage whose downstream stages all are."""

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mine, others = _sorted(unpack(batches), Kind.WRITES, stage.index)
        told = [block for block in others if block.kind is Kind.MARKS]
        if stage.index == 0:
            others = [block for block in others if block.kind is not Kind.MARKS]

        def act(work: Work) -> list[Block]:
            for block in told:
                work.job.known.note(*loads(block.payload))
            return _persist(work, stage, [write for payload in mine for write in loads(payload)])

        yield from _guarded(job, others, act)

    return task


def _fold(work: Work, path: Path, stage: Stage, arrivals: object) -> list[Block]:
    """Fold a stage; the last one is persisted at once if this task has all of its keys, other writes wait."""
    writes, following = path.fold(work, stage, arrivals)
    shared = stage.index == 0 and work.job.may_share_keys
    at_once = following is None and not shared and not work.job.holds_outputs
    blocks = _leave(work, persists=at_once)
    if at_once:
        return [*blocks, *_persist(work, stage, writes)]
    blocks += _waiting(work.job, stage, writes)
    if following is not None:
        blocks += _send(work, path, stage.index + 1, following)
    return blocks


def _leave(work: Work, *, persists: bool = False) -> list[Block]:
    """Publish outputs and dead letters, or send them to the one task that does.

    Args:
        work: What the task has in hand.
        persists: Tasks like this one persist states at once.

    Raises:
        UnlistedError: There are dead letters that the ledger does not list yet.
    """
    if unlisted := work.collector.unlisted():
        raise UnlistedError(frozenset(unlisted), persists)
    if not work.job.holds_outputs:
        with work.timed("publish"):
            publish(work)
        return []
    if not work.outputs and not work.collector.dead:
        return []
    held = Block(0, Kind.OUTPUTS, 0, dumps((work.outputs, list(work.collector.dead.values()))))
    work.outputs = []
    work.collector.dead.clear()
    return [held]


def _send(work: Work, path: Path, stage: int, arrivals: object) -> list[Block]:
    with work.timed("pack"):
        payloads = path.pack(work, arrivals, work.job.routes)
    return [Block(route, Kind.ELEMENTS, stage, payload) for route, payload in enumerate(payloads) if payload]


def _waiting(job: Job, stage: Stage, writes: Sequence[Write]) -> list[Block]:
    """Writes that wait, each for the task of its key: two writes of one key meet there."""
    parts: dict[int, list[Write]] = {}
    for write in writes:
        parts.setdefault(route_of(write.key, job.routes), []).append(write)
    return [Block(route, Kind.WRITES, stage.index, dumps(part)) for route, part in sorted(parts.items())]


def _persist(work: Work, stage: Stage, writes: Sequence[Write]) -> list[Block]:
    """Write the states of a stage.

    Returns:
        What its store acknowledged, for every task that may persist a stage upstream of it: a state there is kept
        together with what proves that those downstream were persisted before.

    Raises:
        StoreWentBack: The store has less than it acknowledged.
        SharedKeyError: Two tasks folded one key. Neither half may be written: it would raise the floor above what
            the other one has.
    """
    if not writes:
        return []
    job = work.job
    if len({write.key for write in writes}) < len(writes):
        raise SharedKeyError(
            f"flow {job.flow.name}, stage {stage.name}: a key was found in two partitions of {_topic(job)}. This run folds the "
            "stage behind a shuffle from now on; after partitions were added nothing else is needed. If the topic is not "
            "partitioned by the stage's key, rebuild into a new generation (--generation) with co_partitioned=False; "
            "in this generation it would fold copies a second time"
        )
    with work.timed("persist"):
        marks = effect(
            CommitStep.PERSIST.of(stage.name),
            lambda: store_of(job.urls[stage.name]).save(
                job.ref.stage(stage.name),
                writes,
                epoch=job.epoch,
                batch=job.batch,
                known=job.known.of(stage.name),
                downstream=job.known.downstream(stage.name),
            ),
        )
    work.report.marks.append((stage.name, marks))
    if not stage.index or not marks:
        return []
    payload = dumps((stage.name, marks))
    return [Block(route, Kind.MARKS, stage.index, payload) for route in range(job.routes)]


def _topic(job: Job) -> str:
    return job.flow.topic.name if job.flow.topic else ""


def _sorted(blocks: Iterable[Block], kind: Kind, stage: int) -> tuple[list[bytes], list[Block]]:
    mine, others = [], []
    for block in blocks:
        if block.kind is kind and block.stage == stage:
            mine.append(block.payload)
        else:
            others.append(block)
    return mine, others


def _guarded(job: Job, others: Sequence[Block], act: Callable[[Work], list[Block]]) -> Iterator[pa.RecordBatch]:
    """Pass on what is for others; act unless somebody failed; send reports and failures on."""
    passed = list(others)
    if not any(block.kind is Kind.FAILURE for block in others):
        if job.driver:
            os.environ[faults.PID] = str(job.driver)
        work = Work(job)
        gc.disable()  # a batch makes many objects and no cycles; collecting them costs half of what histories cost
        try:
            passed += act(work)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except (
            BaseException
        ) as error:  # polars panics with one. It reaches the driver, and stops all tasks behind this one
            failure = _portable(error)
            passed += [Block(route, Kind.FAILURE, 0, failure) for route in range(job.routes)]
        else:
            work.report.seen = dict(work.incarnations.seen)
            work.report.changes = work.collector.changes
            for name, copies in work.collector.copies.items():
                work.report.counts.verdicts.setdefault(name, Counter())[Verdict.COPY.value] += copies
            passed.append(Block(0, Kind.REPORT, 0, dumps(work.report)))
        finally:
            gc.enable()
    yield from pack(passed)


def _portable(error: BaseException) -> bytes:
    """The error for the driver, with its place as a note: a traceback does not cross. Its type only if it cannot."""
    place = "In a task:\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip()
    error.add_note(place)
    try:
        payload = dumps(error)
        loads(payload)
    except Exception:  # somebody's own exception with odd arguments
        substitute = RuntimeError(f"{type(error).__name__} in a task, and the exception itself cannot be pickled")
        substitute.add_note(place)
        return dumps(substitute)
    return payload


def outcome_of(rows: Iterable[tuple[int, bytes]]) -> tuple[TaskReport, list[Exception]]:
    """Put together what the tasks of a batch sent to the driver.

    Args:
        rows: Kind and payload of each block that was left.
    """
    total, failures = TaskReport(), []
    for kind, payload in rows:
        if kind == Kind.REPORT:
            total.add(loads(payload))
        elif kind == Kind.FAILURE:
            failures.append(loads(payload))
    return total, failures

"""Spark's tasks, in the order that the shuffles between them enforce.

    read, fold stage 1 | fold stage 2 | ... | fold the last stage, publish, persist it | persist the one before | ...

The first stage is persisted after a barrier even when it is the only one, unless the batch is of one partition. The barrier
shows whether two partitions contained the same key, for example after partitions were added to the topic. If so,
nothing is written for that key, and the batch is folded again with the first stage after a shuffle.

A barrier is a shuffle: no task after it begins before every task before it is done. States of all stages but the last
therefore wait until every later stage is persisted: downstream first, without the driver in between. They wait as
blocks, those of the first stage in the residents that read it, if there are residents. A task that fails sends its
error to all later tasks, and none of them does anything more.

If different tasks may fold items of one record, nothing may be published before all of them are
folded. The chain is then cut in two, and the driver checks the results in between:

    read, fold stage 1 | ... | fold the last stage || publish | persist the last stage | ...

If a task after a shuffle publishes, one task produces the outputs of all tasks, in the order of their positions:

    read, fold stage 1 | ... | fold the last stage | publish | persist the last stage | ...

A flow without a stage has no shuffle: the task that reads a partition publishes its outputs, in the order of offsets.
"""

import gc
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
from pyspark import cloudpickle

from aggregations.definition.flow import Stage
from aggregations.engine.clients import topics_of
from aggregations.engine.job import Job, TaskReport, dumps, loads, shared_key
from aggregations.engine.path import Work, columnar_path, route_of
from aggregations.engine.persist import persist
from aggregations.engine.publish import publish
from aggregations.engine.roots import check_source
from aggregations.errors import TasksLostError
from aggregations.per_message.ledger import UnlistedError
from aggregations.run.deliveries import Delivered
from aggregations.spark import residents
from aggregations.spark.blocks import Block, Kind, Row, pack, unpack
from aggregations.spark.gather import Chunk, check_same, tables
from aggregations.spark.waiting import keep, take
from envelope import TopicPartition
from envelope.dedup.lineage import position_order
from persistence.commit import faults
from persistence.protocol import Write

if TYPE_CHECKING:
    from aggregations.engine.columnar import ColumnarPath
    from aggregations.engine.rows import Rows

Task = Callable[[Iterable[Row]], Iterator[Row]]


def reading(job: Job) -> Callable[[Iterable[int]], Iterator[Row]]:
    """The task that reads from Kafka: one for each slot, whose number it gets.

    It reads in the resident of the slot, which has fetched ahead: the task runs where the slot was read before.
    """
    payload = cloudpickle.dumps(job)  # type: ignore[no-untyped-call]
    slots, routes = [slot.number for slot in job.attempt.tasks], job.attempt.routes

    def task(numbers: Iterable[int]) -> Iterator[Row]:
        for number in numbers:
            yield from pack(_in_resident(routes, slots[number], read_slot, payload, number))

    return task


def _in_resident(routes: int, slot: int, function: Callable[..., list[Block]], *arguments: object) -> list[Block]:
    """The blocks that a function returns in the resident of a slot."""
    try:
        blocks: list[Block] = residents.call(slot, function, *arguments)
    except TasksLostError as error:
        return _failed(routes, error)
    except residents.ResidentLostError as error:
        return _failed(routes, TasksLostError(f"{error}. Check its memory (a smaller --max-records needs less)"))
    return blocks


def read_slot(payload: bytes, number: int) -> list[Block]:
    """Read a slot, and fold its first stage where no shuffle comes before it.

    Args:
        payload: The job.
        number: Number of the task.
    """
    job: Job = loads(payload)

    from aggregations.engine.fetch import fetcher_of

    def chunks() -> Iterator[pa.Table]:
        name = f"headwater-{job.progress.ref.flow}"
        # A consumer of each topic: the others fetch ahead while one is read.
        for topic, its in job.attempt.tasks[number].by_topic().items():
            fetcher = fetcher_of(job.options.broker, topic, name, headers=job.flow.reads_headers)
            fetch = partial(fetcher.read, stays=residents.is_resident())
            yield from fetch(its) if job.archive is None else job.archive.read(its, fetch)

    return _read(job, number, chunks)


def reading_gathered(
    job: Job, delivered: Mapping[TopicPartition, Delivered]
) -> Callable[[int, Iterable[Chunk]], Iterator[Row]]:
    """The task that reads what was gathered for one slot.

    Args:
        job: The batch.
        delivered: What was gathered, as the driver was told.
    """
    payload = cloudpickle.dumps(job)  # type: ignore[no-untyped-call]
    numbers, slots = {slot.number: number for number, slot in enumerate(job.attempt.tasks)}, job.attempt.routes

    def task(slot: int, kept: Iterable[Chunk]) -> Iterator[Row]:
        if (number := numbers.get(slot)) is None:
            return
        its: Job = loads(payload)

        def chunks() -> Iterator[pa.Table]:
            found = list(kept)
            check_same(found, delivered, slot, slots)
            yield from tables(found, its.attempt.tasks[number].ranges)

        yield from pack(_read(its, number, chunks))

    return task


def _read(job: Job, number: int, chunks: Callable[[], Iterator[pa.Table]]) -> list[Block]:
    """Read a slot, and fold its first stage where no shuffle comes before it.

    Args:
        job: The batch.
        number: Number of the task.
        chunks: Returns its records.
    """

    def act(work: Work) -> list[Block]:
        path = columnar_path()
        arrivals = path.read(work, chunks())
        # Only after all rows were read: if a topic still is the driver's topic, the rows belong to it.
        for topic, its in job.attempt.tasks[number].by_topic().items() if job.options.kafka is not None else ():
            ids = job.progress.topic_ids
            check_source(topics_of(job.options.broker), job.flow, topic, ids[topic], job.read(its))
        if not job.flow.stages:
            return _leave(work)
        if job.folds_while_reading:
            return _fold(work, path, job.flow.stages[0], arrivals, number)
        return [*_leave(work), *_send(work, 0, arrivals)]

    return _guarded(job, [], act)


def folding(job: Job, stage: Stage) -> Task:
    """The task of a stage after a shuffle."""

    def task(rows: Iterable[Row]) -> Iterator[Row]:
        mine, others = _sorted(unpack(rows), Kind.ELEMENTS, stage.index)

        def act(work: Work) -> list[Block]:
            path = columnar_path()
            from aggregations.engine import transfer

            return _fold(work, path, stage, transfer.unpack(mine))

        yield from pack(_guarded(job, others, act))

    return task


def publishing(job: Job) -> Task:
    """The task that publishes waiting outputs."""

    def task(rows: Iterable[Row]) -> Iterator[Row]:
        mine, others = _sorted(unpack(rows), Kind.OUTPUTS, 0)

        def act(work: Work) -> list[Block]:
            for payload in mine:
                outputs, dead = loads(payload)
                work.outputs += outputs
                work.collector.take(dead)
            work.outputs.sort(key=lambda output: position_order(output.order))
            with work.timed("publish"):
                publish(work)
            return []

        yield from pack(_guarded(job, others, act))

    return task


def persisting(job: Job, stage: Stage) -> Task:
    """The task that persists a stage after all of its downstream stages are persisted.

    If two tasks folded one key, neither half is written: it would raise the floor above the positions of the other.
    """
    run, serial = job.progress.run, job.attempt.serial

    def task(rows: Iterable[Row]) -> Iterator[Row]:
        mine, others = _sorted(unpack(rows), Kind.WRITES, stage.index)
        told = [block.payload for block in others if block.kind is Kind.MARKS]
        kept: list[Block] = []
        if stage.index == 0:
            kept = [block for block in others if block.kind is Kind.KEPT]
            others = [block for block in others if block.kind not in (Kind.MARKS, Kind.KEPT)]

        def act(work: Work) -> list[Block]:
            assert not kept, "states of one stage wait in residents or as blocks, never both"
            writes = [write for payload in mine for write in _read_writes(payload)]
            if len({write.key for write in writes}) < len(writes):
                raise shared_key(job, stage)
            return _persist(work, stage, writes, told)

        if kept and not mine and not _has_failed(others):
            number, hashes = kept[0].route, [block.payload for block in kept]
            slot = job.attempt.tasks[number].number
            yield from pack([*others, *_in_resident(job.attempt.routes, slot, persist_kept, run, serial, told, hashes)])
        else:
            yield from pack(_guarded(job, others, act))

    return task


def persist_kept(run: str, serial: int, told: Sequence[bytes], hashes: Sequence[bytes]) -> list[Block]:
    """Persist the states that this process kept.

    Args:
        run: Id of the run.
        serial: Number of the job that folded them.
        told: Marks of later stages.
        hashes: Hashes of the keys that other tasks folded.
    """
    waiting = take(run, serial)
    job = waiting.job

    def act(work: Work) -> list[Block]:
        waiting.check_not_shared(hashes)
        return _persist(work, job.flow.stages[0], waiting.writes, told)

    return _guarded(job, [], act)


def _fold(work: Work, path: "ColumnarPath", stage: Stage, arrivals: "Rows", reads: int | None = None) -> list[Block]:
    """Fold a stage; the last stage is persisted immediately if this task has all of its keys, other writes wait.

    Args:
        work: Context of the task.
        path: The path of whole columns.
        stage: The stage.
        arrivals: What arrives at the stage.
        reads: Number of the task, if it folds what it read.
    """
    writes, following = path.fold(work, stage, arrivals)
    shared = stage.index == 0 and work.job.may_share_keys
    at_once = following is None and not shared and not work.job.holds_outputs
    blocks = _leave(work, persists=at_once)
    if at_once:
        return [*blocks, *_persist(work, stage, writes)]
    if reads is not None and work.job.attempt.local and residents.is_resident():
        blocks += _kept(work.job, reads, writes)
    else:
        blocks += _waiting(work.job, stage, writes)
    if following is not None:
        blocks += _send(work, stage.index + 1, following)
    return blocks


def _leave(work: Work, *, persists: bool = False) -> list[Block]:
    """Publish outputs and dead letters, or send them to the one task that does.

    Args:
        work: Context of the task.
        persists: Tasks of this kind persist states immediately.

    Raises:
        UnlistedError: There are dead letters that the ledger does not list yet.
    """
    if unlisted := work.collector.unlisted():
        # Tasks that publish have perhaps published what a further attempt rejects.
        raise UnlistedError(frozenset(unlisted), persists or (work.job.flow.publishes and not work.job.holds_outputs))
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


def _send(work: Work, stage: int, arrivals: "Rows") -> list[Block]:
    from aggregations.engine import transfer

    with work.timed("pack"):
        payloads = transfer.pack(arrivals, work.job.attempt.routes, work.job.attempt.directory)
    return [Block(route, Kind.ELEMENTS, stage, payload) for route, payload in enumerate(payloads) if payload]


def _kept(job: Job, number: int, writes: Sequence[Write]) -> list[Block]:
    """Keep writes in this process, and show all other tasks that read which keys they have."""
    hashes = keep(job, writes)
    return [Block(other, Kind.KEPT, 0, b"" if other == number else hashes) for other in range(len(job.attempt.tasks))]


def _waiting(job: Job, stage: Stage, writes: Sequence[Write]) -> list[Block]:
    """Writes that wait, each for the task of its key: two writes of one key meet there."""
    parts: dict[int, list[Write]] = {}
    for write in writes:
        parts.setdefault(route_of(write.key, job.attempt.routes), []).append(write)
    encode = msgspec.msgpack.encode  # measured: 0.2 us per write; pickle needs 2.9
    return [Block(route, Kind.WRITES, stage.index, encode(part)) for route, part in sorted(parts.items())]


def _read_writes(payload: bytes) -> list[Write]:
    return msgspec.msgpack.decode(payload, type=list[Write])


def _persist(work: Work, stage: Stage, writes: Sequence[Write], told: Sequence[bytes] = ()) -> list[Block]:
    """Write the states of a stage.

    Args:
        work: Context of the task.
        stage: The stage.
        writes: The states.
        told: Marks that stores of later stages acknowledged.

    Returns:
        Marks that its store acknowledged, for every task that may persist a stage upstream of it: a state there is
        stored with the marks which prove that the states downstream were persisted before.

    Raises:
        StoreWentBack: The store lost acknowledged writes.
    """
    if not writes:
        return []
    job = work.job
    for payload in told:
        job.progress.known.note(*loads(payload))
    marks = persist(work, stage, writes)
    if not stage.index or not marks:
        return []
    payload = dumps((stage.name, marks))
    return [Block(route, Kind.MARKS, stage.index, payload) for route in range(job.attempt.routes)]


def _sorted(blocks: Iterable[Block], kind: Kind, stage: int) -> tuple[list[bytes], list[Block]]:
    mine, others = [], []
    for block in blocks:
        if block.kind is kind and block.stage == stage:
            mine.append(block.payload)
        else:
            others.append(block)
    return mine, others


def _guarded(job: Job, others: Sequence[Block], act: Callable[[Work], list[Block]]) -> list[Block]:
    """Forward the blocks of other tasks; act unless a task failed; forward reports and failures."""
    passed = list(others)
    if not _has_failed(others):
        if job.attempt.driver:
            os.environ[faults.PID] = str(job.attempt.driver)
        work = Work(job)
        gc.disable()  # a batch makes many objects and no cycles; garbage collection costs half as much as histories
        try:
            passed += act(work)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # polars panics with one. It is sent to the driver, and stops all later tasks
            passed += _failed(job.attempt.routes, error)
        else:
            work.report.seen = dict(work.incarnations.seen)
            work.report.changes = work.collector.changes
            work.report.counts.add_copies(work.collector.copies)
            passed.append(Block(0, Kind.REPORT, 0, dumps(work.report)))
        finally:
            gc.enable()
    return passed


def _has_failed(blocks: Iterable[Block]) -> bool:
    return any(block.kind is Kind.FAILURE for block in blocks)


def _failed(routes: int, error: BaseException) -> list[Block]:
    """The error for every task of the next step, and by one of them for the driver."""
    failure = _portable(error)
    return [Block(route, Kind.FAILURE, 0, failure) for route in range(routes)]


def _portable(error: BaseException) -> bytes:
    """The pickled error for the driver, with its traceback as a note. If it cannot be pickled, only its type."""
    place = "In a task:\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip()
    error.add_note(place)
    try:
        payload = dumps(error)
        loads(payload)
    except Exception:  # a user's exception with unusual arguments
        substitute = RuntimeError(f"{type(error).__name__} in a task, and the exception itself cannot be pickled")
        substitute.add_note(place)
        return dumps(substitute)
    return payload


def outcome_of(blocks: Iterable[Block]) -> tuple[TaskReport, list[Exception]]:
    """Combine the results that the tasks of a batch sent to the driver: reports and failures."""
    total, failures = TaskReport(), []
    for block in blocks:
        if block.kind is Kind.REPORT:
            total.add(loads(block.payload))
        elif block.kind is Kind.FAILURE:
            failures.append(loads(block.payload))
    return total, failures

"""States that wait in the resident that folded them until every later stage is persisted.

Only hashes of their keys leave the resident. They show whether two residents folded the same key, for example after
partitions were added to the topic.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.errors import TasksLostError
from aggregations.spark.job import Job, shared_key
from persistence.protocol import FlowRef, Write

Hashes = npt.NDArray[np.uint64]


class Attempt(NamedTuple):
    """One attempt at a batch of a run.

    Attributes:
        flow: The flow.
        epoch: Epoch of the run.
        number: Number of the batch.
        attempt: The attempt.
    """

    flow: FlowRef
    epoch: int
    number: int
    attempt: int

    @classmethod
    def of(cls, job: Job) -> "Attempt":
        """The attempt that a job is."""
        return cls(job.ref, job.epoch, job.batch, job.attempt)


class Waiting(NamedTuple):
    """States of the first stage that one task folded.

    Attributes:
        job: The job of that task.
        writes: The states.
        hashes: Hashes of their keys.
    """

    job: Job
    writes: Sequence[Write]
    hashes: Hashes

    def check_not_shared(self, others: Iterable[bytes]) -> None:
        """Compare the keys with those of other tasks. Two keys may have one hash: then nothing is lost but time.

        Raises:
            SharedKeyError: Another task may have folded one of these keys.
        """
        mine = pl.Series(self.hashes)
        for payload in others:
            theirs = pl.Series(np.frombuffer(payload, np.uint64))
            if mine.is_in(theirs.implode()).any():
                raise shared_key(self.job, self.job.flow.stages[0])


_kept: Final[dict[tuple[FlowRef, int], Waiting]] = {}


def keep(job: Job, number: int, writes: Sequence[Write]) -> bytes:
    """Keep states in this process until they are taken or the task folds another batch; return hashes of their keys.

    Args:
        job: The batch.
        number: Number of the task.
        writes: The states.
    """
    hashes = pl.Series([write.key for write in writes], dtype=pl.Binary).hash().to_numpy()
    _kept[job.ref, number] = Waiting(job, writes, hashes)
    return hashes.tobytes()


def take(attempt: Attempt, number: int) -> Waiting:
    """The states that a task kept.

    Raises:
        TasksLostError: They are not in this process: the one that folded them has ended.
    """
    waiting = _kept.pop((attempt.flow, number), None)
    if waiting is None or Attempt.of(waiting.job) != attempt:
        raise TasksLostError("a resident process ended before it had persisted what it had folded")
    return waiting

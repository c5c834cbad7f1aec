"""States that wait in the resident that folded them until every later stage is persisted.

Only hashes of their keys leave the resident. They show whether two residents folded the same key, for example after
partitions were added to the topic.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from aggregations.engine.idle import keepers
from aggregations.engine.job import Job, shared_key
from aggregations.errors import TasksLostError
from persistence.protocol import Write

Hashes = npt.NDArray[np.uint64]


class Waiting(NamedTuple):
    """States of the first stage that one task folded.

    Attributes:
        job: The job of that task.
        writes: The states.
        hashes: Hashes of their keys.
        since: When they were folded, on the monotonic clock.
    """

    job: Job
    writes: Sequence[Write]
    hashes: Hashes
    since: float

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


_LONGEST_SECONDS: Final = 3600.0
"""Time after which states that wait belong to a run that has ended: its last batch failed."""
_kept: Final[dict[str, Waiting]] = {}
"""By run: a resident executes one task of each of its jobs."""


def _keeps() -> bool:
    for run, waiting in list(_kept.items()):
        if time.monotonic() - waiting.since > _LONGEST_SECONDS:
            del _kept[run]
    return bool(_kept)


keepers.append(_keeps)


def keep(job: Job, writes: Sequence[Write]) -> bytes:
    """Keep states in this process until they are taken or the run folds again; return hashes of their keys.

    Args:
        job: The job that folded them.
        writes: The states.
    """
    hashes = pl.Series([write.key for write in writes], dtype=pl.Binary).hash().to_numpy()
    _kept[job.progress.run] = Waiting(job, writes, hashes, time.monotonic())
    return hashes.tobytes()


def take(run: str, serial: int) -> Waiting:
    """The states that a job kept.

    Args:
        run: Id of the job's run. Two runs of a process may have the same flow, epoch and batch.
        serial: Number of the job within the run.

    Raises:
        TasksLostError: They are not in this process: the one that folded them has ended.
    """
    waiting = _kept.get(run)
    if waiting is None or waiting.job.attempt.serial != serial:
        raise TasksLostError("a resident process ended before it had persisted what it had folded")
    del _kept[run]
    return waiting

"""Spark's own log of a query: local, for one run, and deleted with it.

The manifests say where a run starts. The log is read for one thing: the end offsets that Spark chose for a
batch. The last record plus one is not the end: transaction markers or compacted records may follow it.
"""

import fcntl
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from envelope import TopicPartition

_PREFIX = "headwater-spark-"


class Checkpoint:
    """A fresh directory for one query, locked as long as its driver lives.

    A driver that is killed leaves its directory behind; the next one on the machine finds it unlocked and deletes it.

    Args:
        parent: Where directories are made; None for where this process has its temporary files.

    Attributes:
        path: The directory.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        _sweep(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            with suppress(FileNotFoundError):
                self._handle = os.open(self.path, os.O_RDONLY)
                fcntl.flock(self._handle, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._handle)
            # Another driver swept it before it was locked.

    def ends(self, number: int) -> dict[TopicPartition, int]:
        """Next offset of every topic and partition after a batch, including those without a record in it.

        Args:
            number: Spark's number of the batch, written down before it is delivered.
        """
        topics = json.loads((self.path / "offsets" / str(number)).read_text().splitlines()[-1])
        return {TopicPartition(topic, int(part)): end for topic, parts in topics.items() for part, end in parts.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def _sweep(parent: Path) -> None:
    """Delete the directories of drivers that have ended; an unreadable directory belongs to another user."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)

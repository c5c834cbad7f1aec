"""How the states of one bucket are saved, by the script or by a transaction that does the same, and removed."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final

from persistence.marks import Mark
from persistence.names import StageRef
from persistence.protocol import Write
from persistence.redis.calls import Call, script_call
from persistence.redis.layout import RedisLayout
from persistence.redis.scripts import REMOVE, SAVE
from persistence.redis.transaction import Transaction

_EXPECTED: Final = attrgetter("expected")


@dataclass(frozen=True, slots=True)
class Saving:
    """A save of one bucket.

    Attributes:
        bucket: Name of the bucket's hash.
        states: Name of the hash of its states.
        dues: Name of the sorted set of the times at which they are due.
        stage: Name of their stage.
        epoch: Epoch of the run.
        batch: Number of the batch.
        known: The mark that the bucket is known to have reached.
        point: The point at which the expected versions are the stored ones; empty if that is not known.
        downstream: Marks of the stages downstream; empty for none.
    """

    bucket: bytes
    states: bytes
    dues: bytes
    stage: str
    epoch: int
    batch: int
    known: Mark
    point: bytes
    downstream: bytes

    def call(self, writes: Sequence[Write]) -> Call:
        """The call that writes some of its states, by ascending expected version."""
        save = secrets.token_hex(6).encode()
        transaction = None
        if self.point:
            added = sum(not write.expected for write in writes)
            transaction = Transaction(
                *(self.bucket, self.states, self.stage, self.epoch, self.known, self.point, save, self.downstream),
                added,
                partial(self._contents, writes),
                self.dues,
                {write.key: write.due for write in writes if write.due is not None},
            )
        return script_call(
            SAVE, (self.bucket, self.states, self.dues), partial(self._arguments, writes, save), transaction
        )

    def _arguments(self, writes: Sequence[Write], save: bytes) -> list[bytes | int]:
        """Arguments of the script `SAVE`."""
        same = (b"%d %d" % (version, len(list(some))) for version, some in groupby(map(_EXPECTED, writes)))
        known = self.known.count, self.known.life.encode()
        dues = (b"%d %d" % (n, one.due) for n, one in enumerate(writes, 1) if one.due is not None)
        texts = b" ".join(same), save, b" ".join(dues)
        return [self.epoch, *known, self.downstream, *texts, *self._contents(writes)]

    def _contents(self, writes: Sequence[Write]) -> list[bytes | int]:
        """Key and content of each state."""
        contents: list[bytes | int] = []
        for version, same in groupby(writes, _EXPECTED):
            head = b"%d %d %d " % (version + 1, self.epoch, self.batch)
            for write in same:
                contents += (write.key, head + write.value)
        return contents


def removing(layout: RedisLayout, stage: StageRef, bucket: int, until: int, most: int, epoch: int, known: Mark) -> Call:
    """The call that removes states of a bucket that are due.

    Args:
        layout: Names of the keys.
        stage: Stage of the states.
        bucket: The bucket.
        until: Time at or before which they are due, in seconds since 1970.
        most: Maximum number of states.
        epoch: Epoch of the run.
        known: The mark that the bucket is known to have reached.
    """
    names = layout.bucket(stage.flow_ref, bucket), layout.states(stage, bucket), layout.dues(stage, bucket)
    arguments: list[bytes | int] = [epoch, known.count, known.life.encode(), until, most, secrets.token_hex(6).encode()]
    return script_call(REMOVE, names, arguments)

"""How the states of one bucket are saved: by the script, or by a transaction that does the same."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Final

from persistence.marks import Mark
from persistence.protocol import Write
from persistence.redis.calls import Call, script_call
from persistence.redis.scripts import SAVE
from persistence.redis.transaction import Transaction

_EXPECTED: Final = attrgetter("expected")


@dataclass(frozen=True, slots=True)
class Saving:
    """A save of one bucket.

    Attributes:
        bucket: Name of the bucket's hash.
        states: Name of the hash of its states.
        stage: Name of their stage.
        epoch: Epoch of the run.
        batch: Number of the batch.
        known: The mark that the bucket is known to have reached.
        point: The point at which the expected versions are the stored ones; empty if that is not known.
        downstream: Marks of the stages downstream; empty for none.
    """

    bucket: bytes
    states: bytes
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
            )
        return script_call(SAVE, (self.bucket, self.states), partial(self._arguments, writes, save), transaction)

    def _arguments(self, writes: Sequence[Write], save: bytes) -> list[bytes | int]:
        """Arguments of the script `SAVE`."""
        same = (b"%d %d" % (version, len(list(some))) for version, some in groupby(map(_EXPECTED, writes)))
        known = self.known.count, self.known.life.encode()
        return [self.epoch, *known, self.downstream, b" ".join(same), save, *self._contents(writes)]

    def _contents(self, writes: Sequence[Write]) -> list[bytes | int]:
        """Key and content of each state."""
        contents: list[bytes | int] = []
        for version, same in groupby(writes, _EXPECTED):
            head = b"%d %d %d " % (version + 1, self.epoch, self.batch)
            for write in same:
                contents += (write.key, head + write.value)
        return contents

"""One call of `save`: the scripts that it consists of, and their answers."""

import secrets
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, NamedTuple, NoReturn

from persistence.cas import unknown_epoch
from persistence.errors import Conflict, Corrupt, Fenced
from persistence.marks import Acknowledged, Mark, Marks, behind, encode_downstream, note_mark
from persistence.names import FlowRef
from persistence.protocol import StageRef, Write
from persistence.redis.calls import Call, chunks, script_call
from persistence.redis.held import HeldStates, point_of
from persistence.redis.layout import RedisLayout, by_bucket
from persistence.redis.scripts import SAVE

KEYS: Final = 2500
"""States per script: about 10 ms in which the server does nothing else. Lua can pass on 8,000 values at once."""
_BYTES: Final = 4 << 20
_UNTOUCHED: Final = Mark()
_EXPECTED: Final = attrgetter("expected")


class _Part(NamedTuple):
    """The states of one script.

    Attributes:
        bucket: Their bucket.
        writes: The states.
    """

    bucket: int
    writes: Sequence[Write]


class Save:
    """Writes states of a stage.

    Args:
        stage: The stage.
        writes: The states.
        buckets: Number of buckets of the flow.
        held: The states that this process knows.
        layout: Names of the keys.
        epoch: Epoch of the run.
        batch: Number of the batch.
        known: Marks that the buckets are known to have reached.
        downstream: Marks of the stages downstream.

    Attributes:
        calls: The scripts.
    """

    def __init__(
        self,
        stage: StageRef,
        writes: Sequence[Write],
        buckets: int,
        held: HeldStates,
        layout: RedisLayout,
        *,
        epoch: int,
        batch: int,
        known: Marks,
        downstream: Acknowledged,
    ) -> None:
        self._stage, self._writes, self._held, self._layout = stage, writes, held, layout
        self._epoch, self._batch, self._known = epoch, batch, known
        self._downstream = encode_downstream(epoch, downstream)
        self._id = secrets.token_hex(6).encode()
        self._points: dict[int, bytes] = {}
        self._parts: list[_Part] = []
        self.calls: list[Call] = []
        for bucket, mine in by_bucket([write.key for write in writes], writes, buckets).items():
            self._add(bucket, mine)

    def _add(self, bucket: int, writes: list[Write]) -> None:
        self._points[bucket] = point = self._held.point(self._stage, bucket)
        writes.sort(key=_EXPECTED)
        for run in chunks((len(write.value) for write in writes), KEYS, _BYTES):
            part = _Part(bucket, writes[run])
            knows = self._held.expects(self._stage, bucket, point, part.writes)
            self._parts.append(part)
            names = self._layout.bucket(self._stage.flow_ref, bucket), self._layout.states(self._stage, bucket)
            self.calls.append(script_call(SAVE, names, partial(self._arguments, part, point, knows=knows)))

    def _arguments(self, part: _Part, point: bytes, *, knows: bool) -> list[bytes | int]:
        """Arguments of the script."""
        reached = self._known.get(str(part.bucket), _UNTOUCHED)
        runs = b" ".join(
            b"%d %d" % (version, len(list(same))) for version, same in groupby(map(_EXPECTED, part.writes))
        )
        head = b"%d %d " % (self._epoch, self._batch)
        arguments: list[bytes | int] = [self._epoch, reached.count, reached.life.encode(), self._downstream, runs]
        arguments += (point, self._id, int(knows))
        for write in part.writes:
            arguments += (write.key, b"%d %b%b" % (write.expected + 1, head, write.value))
        return arguments

    def finish(self, answers: Sequence[Any]) -> Marks:
        """The marks of the buckets, from the answers to `calls`.

        Raises:
            StoreError: A script refused its states.
        """
        changed: set[bytes] = set()
        marks: dict[str, Mark] = {}
        points: dict[int, bytes] = {}
        for part, answer in zip(self._parts, answers, strict=True):
            if isinstance(answer, bytes):
                # The last script of a bucket returns its newest mark, unless the bucket went back between two scripts.
                note_mark(self._stage, marks, str(part.bucket), Mark.parse(answer.decode()))
                points[part.bucket] = point_of(answer, self._id + b"+")
            else:
                changed.update(self._refused(part, *answer))
        if changed:
            raise Conflict(tuple(write.key for write in self._writes if write.key in changed), self._stage)
        for bucket, point in points.items():
            # If others have written to the bucket, it is at another point, and this is forgotten when it is looked for.
            mine = [part.writes for part in self._parts if part.bucket == bucket]
            self._held.written(self._stage, bucket, self._points[bucket], point, mine, self._epoch, self._batch)
        return marks

    def _refused(self, part: _Part, kind: bytes, *rest: Any) -> list[bytes]:
        """The changed keys of a script that wrote nothing; raise if it returned an error."""
        if kind == b"CONFLICT":
            return [part.writes[i].key for i in rest]
        if kind == b"LOST":
            raise lost(self._stage, part.bucket, *rest)
        if kind == b"BEHIND":
            bucket = str(part.bucket)
            raise behind(self._stage, bucket, self._known[bucket].short, Mark.parse(rest[0].decode()).short)
        if kind == b"NEWER":
            raise Fenced(
                f"the state was written by epoch {int(rest[1])}; this run has epoch {self._epoch}",
                ref=self._stage,
                key=part.writes[rest[0]].key,
            )
        if kind == b"DAMAGED":
            raise (
                damaged(self._stage, part.writes[rest[0]].key)
                if rest
                else Corrupt("the mark of a bucket cannot be read", ref=self._stage)
            )
        return refuse_epoch(self._stage, kind, self._epoch, int(rest[0]))


def refuse_epoch(ref: FlowRef | StageRef, kind: bytes, epoch: int, installed: int) -> NoReturn:
    """Raise the error of a script that found another epoch."""
    raise Fenced.by(ref, epoch, installed) if kind == b"FENCED" else unknown_epoch(ref, epoch, installed)


def damaged(stage: StageRef, key: bytes) -> Corrupt:
    """The error for a state whose head cannot be read."""
    return Corrupt("the state's head is missing or cannot be read", ref=stage, key=key)


def lost(stage: StageRef, bucket: int, expected: int, found: int) -> Corrupt:
    """The error for a bucket in which states are missing."""
    return Corrupt(
        f"bucket {bucket} has {found} states; the last save left {expected}: states were evicted, expired or deleted, "
        "or another program has written some",
        ref=stage,
    )

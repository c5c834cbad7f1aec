"""Marks: how a flow notices that a store, or a part of one, went back.

A store keeps the states of a stage in one or more buckets, the parts that can go back by themselves. Each bucket has a
mark, which counts the saves that changed it and says during which lives of the server. A life is one server process: a
failover or a restart begins another one, and the mark notes the count at which it began. So a mark that was
acknowledged is either part of the bucket's history, or the bucket went back since: as with the leader epochs of Kafka
(KIP-101), also where later saves have counted up to the same number. A restart that loses nothing begins its life at
the count that was reached, and everything acknowledged before stays part of the history.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Self

import msgspec

from persistence.errors import StoreWentBack
from persistence.names import FlowRef, StageRef

LIVES: Final = 8
"""Lives that a mark remembers. What was acknowledged before the oldest of them counts as held."""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """What a bucket has, or had when it was acknowledged.

    Attributes:
        count: Saves that changed the bucket, or for a store that is not `counted` a number that no later save lowers.
        lives: (life, count at which it began), newest first; empty for a store that has one life.
    """

    count: int = 0
    lives: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` gives, or `short`."""
        count, *lives = text.split() or ["0"]
        pairs = (life.partition(":") for life in lives)
        return cls(int(count), tuple((life, int(begin or 0)) for life, _, begin in pairs))

    @property
    def life(self) -> str:
        """The life in which it was reached."""
        return self.lives[0][0] if self.lives else ""

    @property
    def short(self) -> str:
        """Count and life: enough to be looked for in a history."""
        return f"{self.count} {self.life}".rstrip()

    def holds(self, other: "Mark") -> bool:
        """Whether `other`, which was acknowledged, is part of this bucket's history."""
        upper = self.count
        for life, begin in self.lives:
            if life == other.life and begin < other.count <= upper:
                return True
            upper = begin
        return other.count <= upper  # 0 where the history is whole

    def next(self, life: str = "") -> "Mark":
        """The mark after one save more, in a life of the server."""
        lives = self.lives if life == self.life else ((life, self.count), *self.lives)[:LIVES]
        return Mark(self.count + 1, lives)

    def __str__(self) -> str:
        return " ".join([str(self.count), *(f"{life}:{begin}" for life, begin in self.lives)])


Marks = Mapping[str, Mark]
"""Marks by bucket."""
Acknowledged = Mapping[str, Mapping[str, str]]
"""Short marks by stage and bucket."""
NONE: Final[Mapping[str, Any]] = MappingProxyType({})
"""No marks."""


class Bucket(msgspec.Struct, frozen=True):
    """What stands beside the states of a bucket.

    Attributes:
        mark: Its mark.
        epoch: Epoch of the run that wrote `downstream`.
        downstream: What stages downstream had acknowledged when the bucket was saved last.
    """

    mark: Mark = Mark()
    epoch: int = 0
    downstream: Acknowledged = {}


class _Note(msgspec.Struct):
    epoch: int
    marks: dict[str, dict[str, str]]


_decoder = msgspec.json.Decoder(_Note)


def encode_downstream(epoch: int, downstream: Acknowledged) -> bytes:
    """Serialize what a bucket keeps of stages downstream; empty when there are none."""
    return msgspec.json.encode({"epoch": epoch, "marks": downstream}) if downstream else b""


def bucket_of_parts(mark: Mark, note: bytes | str | None) -> Bucket:
    """Put together a mark and what `encode_downstream` wrote."""
    if not note:
        return Bucket(mark)
    read = _decoder.decode(note)
    return Bucket(mark, read.epoch, read.marks)


def check_held(stage: StageRef, bucket: str, mark: Mark, known: Marks) -> None:
    """Refuse a bucket that went back (contract 24).

    Raises:
        StoreWentBack: It does not hold the mark that is known of it.
    """
    if bucket in known and not mark.holds(known[bucket]):
        raise behind(stage, bucket, known[bucket].short, mark.short)


def behind(stage: StageRef, bucket: str, wanted: str, found: str) -> StoreWentBack:
    """The error of a bucket that does not hold a mark that was acknowledged."""
    return StoreWentBack(
        f"bucket {bucket} went back: save {wanted} was acknowledged and is not in its history, which ends at save {found}",
        at=stage,
    )


def note_mark(stage: StageRef, known: dict[str, Mark], bucket: str, mark: Mark) -> None:
    """Keep the newer of what is known of a bucket and what a save returned.

    Raises:
        StoreWentBack: They cannot be of one history: between them the bucket went back.
    """
    before = known.get(bucket)
    if before is None or mark.holds(before):
        known[bucket] = mark
    elif not before.holds(mark):
        raise behind(stage, bucket, before.short, mark.short)


class KnownMarks:
    """What the buckets of a flow have acknowledged, as far as its run knows.

    Args:
        flow: The flow.
        stages: Names of its stages, upstream first.

    Attributes:
        known: Marks by stage and bucket.
    """

    def __init__(self, flow: FlowRef, stages: Sequence[str]) -> None:
        self._flow = flow
        self._stages = stages
        self.known: dict[str, dict[str, Mark]] = {}

    def of(self, stage: str) -> Marks:
        """What is known of a stage."""
        return self.known.get(stage, NONE)

    def note(self, stage: str, marks: Marks) -> None:
        """Add what saves returned.

        Raises:
            StoreWentBack: Two of them cannot be of one history: between them the bucket went back.
        """
        known = self.known.setdefault(stage, {})
        for bucket, mark in marks.items():
            note_mark(self._flow.stage(stage), known, bucket, mark)

    def learn(self, stage: str, marks: Marks) -> None:
        """Take what all buckets of a stage hold now.

        Raises:
            StoreWentBack: One does not hold what is known of it.
        """
        for bucket, mark in marks.items():
            check_held(self._flow.stage(stage), bucket, mark, self.of(stage))
        self.known[stage] = dict(marks)

    def check(self, stage: str, acknowledged: Mapping[str, str]) -> None:
        """Compare what somebody upstream was told of a stage with what is known of it.

        Raises:
            StoreWentBack: A bucket does not hold it.
        """
        for bucket, text in acknowledged.items():
            if bucket in self.of(stage):
                check_held(self._flow.stage(stage), bucket, self.of(stage)[bucket], {bucket: Mark.parse(text)})

    def downstream(self, stage: str) -> dict[str, dict[str, str]]:
        """What the stages behind `stage` have acknowledged: what its buckets keep."""
        return self.acknowledged(self._stages[self._stages.index(stage) + 1 :])

    def acknowledged(self, stages: Sequence[str]) -> dict[str, dict[str, str]]:
        """What these stages have acknowledged."""
        return {
            stage: marks
            for stage in stages
            if (marks := {bucket: mark.short for bucket, mark in self.of(stage).items() if mark.count})
        }

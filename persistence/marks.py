"""Marks: how a flow detects that a store, or a part of it, went back.

A store keeps the states of a stage in one or more buckets, the parts that can go back independently. Each bucket has a
mark, which counts the saves that changed it and lists the lives of the server in which they happened. A life is one
server process: a failover or a restart begins a new life, and the mark stores the count at which it began. So an
acknowledged mark is either part of the bucket's history, or the bucket went back since then: as with the leader epochs
of Kafka (KIP-101), even if later saves have raised the count to the same number. A restart that loses nothing begins
its life at the count that was reached, and everything acknowledged before stays part of the history.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Self

import msgspec

from persistence.errors import StoreWentBack
from persistence.names import FlowRef, StageRef

LIVES: Final = 8
"""Lives that a mark remembers. Marks acknowledged before the oldest of them count as held."""


class Mark(msgspec.Struct, frozen=True, gc=False):
    """State of a bucket's history, now or when it was acknowledged.

    Attributes:
        count: Saves that changed the bucket; for a store that is not `counted`, a number that no later save lowers.
        lives: (life, count at which it began), newest first; empty for a store that has one life.
    """

    count: int = 0
    lives: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of `str` or of `short`."""
        count, *lives = text.split() or ["0"]
        pairs = (life.partition(":") for life in lives)
        return cls(int(count), tuple((life, int(begin or 0)) for life, _, begin in pairs))

    @property
    def life(self) -> str:
        """The life in which the count was reached."""
        return self.lives[0][0] if self.lives else ""

    @property
    def short(self) -> str:
        """Count and life: enough to find the mark in a history."""
        return f"{self.count} {self.life}".rstrip()

    def holds(self, other: "Mark") -> bool:
        """Whether the acknowledged mark `other` is part of this bucket's history."""
        upper = self.count
        for life, begin in self.lives:
            if life == other.life and begin < other.count <= upper:
                return True
            upper = begin
        return other.count <= upper  # 0 when the history is complete

    def next(self, life: str = "") -> "Mark":
        """The mark after one more save, in a life of the server."""
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
    """The mark and notes that are stored with the states of a bucket.

    Attributes:
        mark: Its mark.
        epoch: Epoch of the run that wrote `downstream`.
        downstream: Marks that the stages downstream had acknowledged when the bucket was last saved.
        removed: Event time up to which states were removed, in seconds since 1970; None if none ever was.
    """

    mark: Mark = Mark()
    epoch: int = 0
    downstream: Acknowledged = {}
    removed: int | None = None


class _Note(msgspec.Struct):
    epoch: int
    marks: dict[str, dict[str, str]]


_decoder = msgspec.json.Decoder(_Note)


def encode_downstream(epoch: int, downstream: Acknowledged) -> bytes:
    """Serialize the marks of stages downstream, as a bucket stores them; empty when there are none."""
    return msgspec.json.encode({"epoch": epoch, "marks": downstream}) if downstream else b""


def bucket_of_parts(mark: Mark, note: bytes | str | None, removed: int | None = None) -> Bucket:
    """Combine a mark, the result of `encode_downstream`, and the time up to which states were removed."""
    if not note:
        return Bucket(mark, removed=removed)
    read = _decoder.decode(note)
    return Bucket(mark, read.epoch, read.marks, removed)


def check_held(stage: StageRef, bucket: str, mark: Mark, known: Marks) -> None:
    """Refuse a bucket that went back (contract 24).

    Raises:
        StoreWentBack: The bucket does not hold its known mark.
    """
    if bucket in known and not mark.holds(known[bucket]):
        raise behind(stage, bucket, known[bucket].short, mark.short)


def behind(stage: StageRef, bucket: str, wanted: str, found: str) -> StoreWentBack:
    """The error for a bucket that does not hold an acknowledged mark."""
    return StoreWentBack(
        f"bucket {bucket} went back: save {wanted} was acknowledged and is not in its history, which ends at save {found}",
        ref=stage,
    )


def note_mark(stage: StageRef, known: dict[str, Mark], bucket: str, mark: Mark) -> None:
    """Keep the newer of a bucket's known mark and the mark that a save returned.

    Raises:
        StoreWentBack: They cannot belong to one history: between them the bucket went back.
    """
    before = known.get(bucket)
    if before is None or mark.holds(before):
        known[bucket] = mark
    elif not before.holds(mark):
        raise behind(stage, bucket, before.short, mark.short)


class KnownMarks:
    """The marks that the buckets of a flow have acknowledged to its run.

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
        """Known marks of a stage."""
        return self.known.get(stage, NONE)

    def note(self, stage: str, marks: Marks) -> None:
        """Add the marks that saves returned.

        Raises:
            StoreWentBack: Two marks cannot belong to one history: between them the bucket went back.
        """
        known = self.known.setdefault(stage, {})
        for bucket, mark in marks.items():
            note_mark(self._flow.stage(stage), known, bucket, mark)

    def learn(self, stage: str, marks: Marks) -> None:
        """Replace the known marks by the current marks of all buckets of a stage.

        Raises:
            StoreWentBack: A bucket does not hold its known mark.
        """
        for bucket, mark in marks.items():
            check_held(self._flow.stage(stage), bucket, mark, self.of(stage))
        self.known[stage] = dict(marks)

    def check(self, stage: str, acknowledged: Mapping[str, str]) -> None:
        """Compare the marks of a stage that are stored upstream with the known marks.

        Raises:
            StoreWentBack: A bucket does not hold such a mark.
        """
        for bucket, text in acknowledged.items():
            if bucket in self.of(stage):
                check_held(self._flow.stage(stage), bucket, self.of(stage)[bucket], {bucket: Mark.parse(text)})

    def downstream(self, stage: str) -> dict[str, dict[str, str]]:
        """Marks that the stages after `stage` have acknowledged; the buckets of `stage` store them."""
        return self.acknowledged(self._stages[self._stages.index(stage) + 1 :])

    def acknowledged(self, stages: Sequence[str]) -> dict[str, dict[str, str]]:
        """Marks that these stages have acknowledged."""
        return {
            stage: marks
            for stage in stages
            if (marks := {bucket: mark.short for bucket, mark in self.of(stage).items() if mark.count})
        }

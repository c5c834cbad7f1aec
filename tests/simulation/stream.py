"""The simulated checkpoint of a Spark query that delivers a flow's records: two logs, which may be lost, older or ahead."""

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from aggregations.definition.element import Record
from aggregations.run.deliveries import Delivered
from envelope import TopicPartition

Offsets = Mapping[TopicPartition, int]
_KINDS = (*["kept"] * 4, "lost", "older", "uncommitted", "ahead")


class Checkpoint:
    """What Spark knows of a query. It does not know the flow's stores.

    Args:
        seed: Of what becomes of it.

    Attributes:
        offsets: Where each batch ends, written before the batch.
        committed: Number of batches of which Spark has noted the end.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(f"checkpoint {seed}")
        self.offsets: list[Offsets] = []
        self.committed = 0

    def restart(self, ends: Offsets) -> None:
        """A driver starts: the checkpoint is kept, lost, an older copy, without its last commit, or of another query."""
        kind = self._random.choice(_KINDS)
        if kind == "lost":
            self.reset()
        elif kind == "older":
            self.offsets = self.offsets[: self._random.randint(0, len(self.offsets))]
            self.committed = min(self.committed, len(self.offsets))
        elif kind == "uncommitted":
            self.committed = max(self.committed - 1, 0)
        elif kind == "ahead":
            self.offsets.append({place: self._random.randint(0, end) for place, end in ends.items()})
            self.committed = len(self.offsets)

    def reset(self) -> None:
        """Begin anew at the beginning of the log."""
        self.offsets, self.committed = [], 0

    def next(self, ends: Offsets, limit: int) -> dict[TopicPartition, tuple[int, int]]:
        """The next batch: a range of every partition. One without a commit is repeated; empty if there is nothing new."""
        starts = self.offsets[self.committed - 1] if self.committed else {}
        if self.committed == len(self.offsets):
            limits = {place: min(end, starts.get(place, 0) + limit) for place, end in ends.items()}
            if all(limits[place] <= starts.get(place, 0) for place in limits):
                return {}
            self.offsets.append({place: max(one, starts.get(place, 0)) for place, one in limits.items()})
        batch = self.offsets[self.committed]
        return {place: (starts.get(place, 0), end) for place, end in batch.items()}

    def rows(self, records: Sequence[Record]) -> list[Record]:
        """The rows of a batch: in any order, some twice."""
        rows = [*records, *self._random.choices(records, k=min(len(records), 2))] if records else []
        self._random.shuffle(rows)
        return rows

    def commit(self) -> None:
        """Note that a batch has ended."""
        self.committed = min(self.committed + 1, len(self.offsets))


def is_to_be_folded(batch: int, last: int) -> bool:
    """Whether a batch is looked at, by Spark's number of it and that of the last commit: always."""
    return True


def delivered(rows: Iterable[Record]) -> dict[TopicPartition, Delivered]:
    """What a batch has of every partition."""
    offsets: dict[TopicPartition, set[int]] = {}
    for row in rows:
        offsets.setdefault(TopicPartition(row.topic, row.partition), set()).add(row.offset)
    return {place: Delivered(place, min(found), max(found) + 1, len(found)) for place, found in offsets.items()}

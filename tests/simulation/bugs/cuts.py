"""Bugs of logs that lose their newest records and give their offsets to new ones."""

from collections.abc import Mapping, Sequence

from aggregations.run import plan
from envelope.dedup import lineage
from envelope.limits import OFFSET_MASK
from jobs.republish import offsets
from persistence.kept import Kept
from tests.simulation.patch import Patch, original

_covers = original(Kept, "covers")


def _by_its_offset(self: Kept, record: object) -> bool:
    at = {place: position & OFFSET_MASK for place, position in self.positions.items()}
    return bool(_covers(Kept(positions=at), _Plain(record)))


class _Plain:
    """A record without its leader epoch."""

    leader_epoch = None

    def __init__(self, record: object) -> None:
        self._record = record

    def __getattr__(self, name: str) -> object:
        return getattr(self._record, name)


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "cut-makes-no-branch": (
        "records of a log that was written anew have the names of those that were lost",
        [(plan, "written_anew", lambda branches, *_: tuple(branches))],
    ),
    "cut-root-without-epoch": (
        "the position of a root is its offset, in whatever leader epoch it was written",
        [(lineage, "root_number", lambda offset, _epoch: offset)],
    ),
    "cut-not-noticed": (
        "a flow does not ask where the records of the noted leader epoch end",
        [(plan, "_as_it_is", lambda _flow, _broker, _partition, log, *_: (log, []))],
    ),
    "service-cut-not-noticed": (
        "a republisher does not ask where the records of the committed leader epoch end",
        [(offsets, "former_ends", lambda *_: {})],
    ),
    "service-filter-covers-by-offset": (
        "a republisher's filter drops what was written anew at offsets that it has judged",
        [(Kept, "covers", _by_its_offset)],
    ),
}
"""Name to what is wrong, and the patches that make it so."""

"""Bugs of logs that lose their newest records and give their offsets to new ones."""

from collections.abc import Mapping, Sequence
from typing import Any

from aggregations.run import plan
from envelope.dedup import lineage
from envelope.limits import OFFSET_MASK
from jobs.republish import offsets
from persistence.kept import Kept
from tests.simulation.patch import Patch


def _by_its_offset(self: Any, record: Any) -> bool:
    return bool(record.offset < self._position(record) & OFFSET_MASK)


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

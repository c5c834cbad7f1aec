"""Bugs of mends of chosen keys: states with other positions, or with dead letters that later stages never get."""

from collections.abc import Mapping, Sequence
from typing import Any

from aggregations.run import mend
from envelope import Histories
from jobs import mending
from tests.simulation.patch import Patch


def _without_positions(stage: Any, key: bytes, old: Histories, new: Histories, batch: int) -> Histories:
    return Histories({}, new.holes)


def _with_the_former_ones(stage: Any, key: bytes, old: Histories, new: Histories, batch: int) -> Histories:
    return Histories(old.lanes, new.holes)


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "repair-forgets-positions": ("mended states hold no positions", [(mend, "_histories", _without_positions)]),
    "repair-keeps-positions": ("mended states hold what they held", [(mend, "_histories", _with_the_former_ones)]),
    "repair-keeps-no-holes": (
        "mended states have no holes",
        [(mend, "_histories", lambda stage, key, old, new, batch: Histories(new.lanes))],
    ),
    "repair-takes-waiting-letters": (
        "a mend folds dead letters that wait, and later stages never get them",
        [(mending, "check_waiting", lambda *_: None)],
    ),
    "repair-does-not-look-again": (
        "a mend does not see that a run began after it had read the states",
        [(mend, "check_unchanged", lambda *_: None)],
    ),
}

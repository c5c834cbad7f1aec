"""Bugs of a flow whose records Spark delivers: what is believed instead of the flow's positions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aggregations.run import deliveries
from tests.simulation import stream
from tests.simulation.patch import Patch
from tests.simulation.topology import Spec


def _whole_or_not(delivered: Mapping[Any, Any], positions: Any) -> dict[Any, tuple[int, int]]:
    return {place: (one.first, one.end) for place, one in delivered.items() if one.first >= positions.get(place, 0)}


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "overlap-left-out": ("a batch that overlaps is left out as a whole", [(deliveries, "new", _whole_or_not)]),
    "gap-accepted": ("a batch that does not continue is folded", [(deliveries, "missing", lambda *_: {})]),
    "batch-id-believed": (
        "a batch whose number is not above that of the last commit is left out",
        [(stream, "is_to_be_folded", lambda batch, last: batch > last)],
    ),
}

MATTERS: Mapping[str, Callable[[Spec], bool]] = dict.fromkeys(BUGS, lambda spec: bool(spec.streamed))

"""Bugs of filters that are steps of the flow."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.per_message import judging
from envelope.filters.arrival import ACCEPTED
from envelope.filters.event_ids import EventIdFilter
from envelope.filters.index import TimeIndex
from tests.simulation.patch import Patch, original

_judge = original(EventIdFilter, "judge")
_dump = original(TimeIndex, "dump")
_judge_key = judging._judge_key


def _passes_all(self: EventIdFilter, state: Any, arrival: Any) -> Any:
    return ACCEPTED, _judge(self, state, arrival)[1]


def _forgets_the_last(self: TimeIndex) -> Any:
    return _dump(self)[:-1]


def _as_first_written(*arguments: Any, **options: Any) -> Any:
    made, before = _judge_key(*arguments, **options), arguments[1]
    if made.state is not None and before.folded:
        made.state = replace(made.state, fold=before.fold)
    return made


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "filter-passes-copies": ("a filter passes on every record", [(EventIdFilter, "judge", _passes_all)]),
    "filter-forgets-an-id": ("a filter does not store its latest id", [(TimeIndex, "dump", _forgets_the_last)]),
    "filter-state-not-continued": (
        "the state of a filter stays as it was first written",
        [(judging, "_judge_key", _as_first_written)],
    ),
}

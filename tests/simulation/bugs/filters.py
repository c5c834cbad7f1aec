"""Bugs of filters that are steps of the flow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.per_message import judging
from envelope import Verdict
from envelope.filters.arrival import ACCEPTED
from envelope.filters.event_ids import EventIdFilter
from envelope.filters.index import TimeIndex
from envelope.filters.interval import IntervalFilter, IntervalState
from envelope.filters.producers import ProducerFilter
from envelope.filters.sequence import LastSeen, SequenceFilter
from tests.simulation.patch import Patch, original
from tests.simulation.topology import Spec

_judge = original(EventIdFilter, "judge")
_dump = original(TimeIndex, "dump")
_judge_key = judging._judge_key
_sequence = original(SequenceFilter, "judge")
_number = original(ProducerFilter, "dump")


def _passes_all(self: EventIdFilter, state: Any, arrival: Any) -> Any:
    return ACCEPTED, _judge(self, state, arrival)[1]


def _forgets_the_last(self: TimeIndex) -> Any:
    return _dump(self)[:-1]


def _as_first_written(*arguments: Any, **options: Any) -> Any:
    made, before = _judge_key(*arguments, **options), arguments[1]
    if made.state is not None and before.folded:
        made.state = replace(made.state, fold=before.fold)
    return made


def _passes_the_last_number(self: SequenceFilter, state: LastSeen, arrival: Any) -> Any:
    ruling, after = _sequence(self, state, arrival)
    return (ACCEPTED, after) if ruling.verdict is Verdict.DUPLICATE else (ruling, after)


def _stores_the_number_before(self: ProducerFilter, state: Any) -> Any:
    value = _number(self, state)
    for known in value["producers"].values():
        known["highest"] -= 1
    return value


def _begins_anew(self: IntervalFilter, value: Any) -> IntervalState:
    return IntervalState(value["stream_time_ms"], TimeIndex())


_BY_FILTER: Mapping[str, Mapping[str, tuple[str, Sequence[Patch]]]] = {
    "event id": {
        "filter-passes-copies": ("a filter passes on every record", [(EventIdFilter, "judge", _passes_all)]),
        "filter-forgets-an-id": ("a filter does not store its latest id", [(TimeIndex, "dump", _forgets_the_last)]),
    },
    "interval": {
        "interval-begins-with-each-batch": (
            "an interval filter forgets its ids at the end of a batch",
            [(IntervalFilter, "load", _begins_anew)],
        )
    },
    "sequence": {
        "sequence-passes-the-last-number": (
            "a sequence filter passes on the last number again",
            [(SequenceFilter, "judge", _passes_the_last_number)],
        )
    },
    "producer": {
        "producer-stores-the-number-before": (
            "a producer filter stores the number before the highest one",
            [(ProducerFilter, "dump", _stores_the_number_before)],
        )
    },
}
BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    **{name: bug for bugs in _BY_FILTER.values() for name, bug in bugs.items()},
    "filter-state-not-continued": (
        "the state of a filter stays as it was first written",
        [(judging, "_judge_key", _as_first_written)],
    ),
}


def _has(rule: str) -> Callable[[Spec], bool]:
    return lambda spec: spec.deduplicates == rule


MATTERS: Mapping[str, Callable[[Spec], bool]] = {
    **dict.fromkeys(BUGS, lambda spec: bool(spec.deduplicates)),
    **{name: _has(rule) for rule, bugs in _BY_FILTER.items() for name in bugs},
}

"""Bugs of filters: those that are steps of the flow, and those of republishers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.per_message import judging
from aggregations.run import memory
from envelope import Verdict
from envelope.filters.arrival import ACCEPTED, place_of
from envelope.filters.distinct import DistinctSession, DistinctTumbling, Sessions, SessionState, TumblingState
from envelope.filters.event_ids import EventIdFilter
from envelope.filters.index import TimeIndex
from envelope.filters.interval import IntervalFilter, IntervalState
from envelope.filters.producers import ProducerFilter
from envelope.filters.sequence import LastSeen, SequenceFilter
from jobs.republish.filtering import RecordFilter
from jobs.republish.worker import Worker
from persistence.errors import Conflict
from persistence.kept import KeptValues
from tests.simulation.patch import Patch, original
from tests.simulation.topology import (
    BY_KEY,
    CHANGED_KEY,
    ONE_TOPIC,
    OVER_PARTITIONS,
    SHORT,
    SPANNING,
    SPREAD_IDS,
    Processor,
    Spec,
)

_judge = original(EventIdFilter, "judge")
_dump = original(TimeIndex, "dump")
_judge_key = judging._judge_key
_sequence = original(SequenceFilter, "judge")
_number = original(ProducerFilter, "dump")
_finish = original(Worker, "finish")
_save = original(KeptValues, "save")
_load_ids = original(EventIdFilter, "load")
_IN_FLOWS = (*SPANNING, *BY_KEY, SHORT, ONE_TOPIC)
"""Filters that no simulated republisher has."""


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


def _forgets(self: EventIdFilter | SequenceFilter, value: Any) -> Any:
    return self.zero()


def _closes_windows(self: DistinctTumbling, value: Any) -> TumblingState:
    return TumblingState(value["stream_time_ms"], TimeIndex())


def _closes_sessions(self: DistinctSession, value: Any) -> SessionState:
    return SessionState(value["stream_time_ms"], Sessions({}))


def _spread_by_partition(self: Any, arrival: Any) -> bytes:
    return place_of(arrival).encode()


def _without_a_floor(self: EventIdFilter, value: Any) -> Any:
    return _load_ids(self, {**value, "floor_ms": None})


def _drops_the_unjudged(*arguments: Any, **options: Any) -> Any:
    made, stage = _judge_key(*arguments, **options), arguments[0]
    arrivals = arguments[2]
    made.emitted = {i: one for i, one in made.emitted.items() if arrivals[i].element.topic not in stage.fold.unjudged}
    return made


def _states_first(self: Worker, timeout: float | None = None) -> None:
    if self._filter:
        self._filter.save(self._judged())
    _finish(self, timeout)


def _never_saved(self: RecordFilter, parts: Any) -> None:
    """Keep the states in memory only."""


def _overwrites(self: KeptValues, values: Any) -> None:
    try:
        _save(self, values)
    except Conflict:
        for key, found in self.load(values).items():
            values[key].version = found.version
        _save(self, values)


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
    "distinct": {
        "distinct-closes-windows-with-each-batch": (
            "a filter of windows forgets the open ones at the end of a batch",
            [(DistinctTumbling, "load", _closes_windows)],
        )
    },
    CHANGED_KEY: {
        "changed-key-is-not-spread": (
            "a filter by a changed key has a state for each partition",
            [(IntervalFilter, "scope", _spread_by_partition)],
        )
    },
    SPREAD_IDS: {
        "ids-are-not-spread": (
            "a filter of ids over all partitions has a state for each partition",
            [(EventIdFilter, "scope", _spread_by_partition)],
        )
    },
    "sequence by key": {
        "number-of-a-key-begins-with-each-batch": (
            "a sequence filter by key forgets the number at the end of a batch",
            [(SequenceFilter, "load", _forgets)],
        )
    },
    "event id by key": {
        "ids-of-a-key-begin-with-each-batch": (
            "a filter of ids by key forgets them at the end of a batch",
            [(EventIdFilter, "load", _forgets)],
        )
    },
    SHORT: {
        "floor-is-not-stored": (
            "a filter of ids forgets up to which time it has forgotten some",
            [(EventIdFilter, "load", _without_a_floor)],
        )
    },
    ONE_TOPIC: {
        "unjudged-topics-are-dropped": (
            "elements of topics that a policy excludes are dropped",
            [(judging, "_judge_key", _drops_the_unjudged)],
        )
    },
    OVER_PARTITIONS: {
        "batch-not-repeated": (
            "after a crash, a flow with a filter over all partitions begins with another batch",
            [(memory, "begin_batch", lambda *_: None)],
        )
    },
    "sessions": {
        "distinct-closes-sessions-with-each-batch": (
            "a filter of sessions forgets the open ones at the end of a batch",
            [(DistinctSession, "load", _closes_sessions)],
        )
    },
}
_OF_SERVICES: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "service-filter-saves-first": (
        "a republisher writes the states of its filter before its outputs are acknowledged",
        [(Worker, "finish", _states_first)],
    ),
    "service-filter-never-saves": (
        "a republisher does not write the states of its filter",
        [(RecordFilter, "save", _never_saved)],
    ),
    "service-filter-overwrites": (
        "a republisher writes the state of its filter over that of another process",
        [(KeptValues, "save", _overwrites)],
    ),
}
BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    **{name: bug for bugs in _BY_FILTER.values() for name, bug in bugs.items()},
    **{
        f"service-{name}": (f"in a republisher: {text}", patches)
        for rule, bugs in _BY_FILTER.items()
        for name, (text, patches) in bugs.items()
        if rule not in _IN_FLOWS
    },
    **_OF_SERVICES,
    "filter-state-not-continued": (
        "the state of a filter stays as it was first written",
        [(judging, "_judge_key", _as_first_written)],
    ),
}


def _has(rule: str) -> Callable[[Spec], bool]:
    return lambda spec: spec.deduplicates == rule


def _service_has(rule: str) -> Callable[[Spec], bool]:
    return lambda spec: any(one.deduplicates == rule for one in _filtering(spec))


def _filtering(spec: Spec) -> list[Processor]:
    """The services that read events that are written twice."""
    return [one for one in spec.processors if one.source in spec.filtered_roots]


MATTERS: Mapping[str, Callable[[Spec], bool]] = {
    **dict.fromkeys(BUGS, lambda spec: bool(spec.deduplicates)),
    **dict.fromkeys(_OF_SERVICES, lambda spec: bool(_filtering(spec))),
    **{name: _has(rule) for rule, bugs in _BY_FILTER.items() for name in bugs},
    **{
        f"service-{name}": _service_has(rule)
        for rule, bugs in _BY_FILTER.items()
        for name in bugs
        if rule not in _IN_FLOWS
    },
}

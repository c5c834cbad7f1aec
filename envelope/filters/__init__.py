"""Filters that drop duplicates, each usable alone. Pure code: no I/O, no clock.

A filter is a value: `judge(state, record)` returns a ruling and the next state. `FilterStates` keeps the states in
memory; `persistence.StoredFilter` keeps them in a store.
"""

from envelope.filters.arrival import Arrival, Filter, Ruling, Scope, Windowed, from_envelope, from_header, from_value
from envelope.filters.distinct import SessionWindows, TimeWindows, distinct
from envelope.filters.event_ids import Beyond, EventIdFilter
from envelope.filters.interval import deduplicate, deduplicate_by_key, deduplicate_by_key_value
from envelope.filters.producers import Gaps, ProducerFilter, Stamp
from envelope.filters.sequence import Decreasing, SequenceFilter, Unusable
from envelope.filters.sequence_maps import DedupPolicy, Entry, SequenceMaps, Snapshot
from envelope.filters.states import FilterStates

__all__ = [
    "Arrival",
    "Beyond",
    "Decreasing",
    "DedupPolicy",
    "Entry",
    "EventIdFilter",
    "Filter",
    "FilterStates",
    "Gaps",
    "ProducerFilter",
    "Ruling",
    "Scope",
    "SequenceFilter",
    "SequenceMaps",
    "SessionWindows",
    "Snapshot",
    "Stamp",
    "TimeWindows",
    "Unusable",
    "Windowed",
    "deduplicate",
    "deduplicate_by_key",
    "deduplicate_by_key_value",
    "distinct",
    "from_envelope",
    "from_header",
    "from_value",
]

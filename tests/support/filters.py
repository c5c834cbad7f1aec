"""Filters that tests name as `module:name`."""

from envelope.filters import DedupPolicy, SequenceFilter, from_value

by_id = SequenceFilter(from_value("id"))
only_strict = DedupPolicy(default=False, namespaces={"strict": True})

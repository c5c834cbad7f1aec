"""Filters that tests name as `module:name`."""

from envelope.filters import SequenceFilter, from_value

by_id = SequenceFilter(from_value("id"))

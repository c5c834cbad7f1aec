"""Filters that tests name as `module:name`."""

from datetime import timedelta

from envelope.filters import (
    DedupPolicy,
    EventIdFilter,
    Gaps,
    ProducerFilter,
    SequenceFilter,
    SessionWindows,
    Stamp,
    deduplicate_by_key_value,
    distinct,
    from_value,
)

by_id = SequenceFilter(from_value("id"))
event_ids = EventIdFilter(from_value("id"), timedelta(days=1))
keys_and_ids = deduplicate_by_key_value(from_value("id"), timedelta(days=1))
sessions = distinct(SessionWindows(timedelta(0)), time=from_value("id"))
desks = ProducerFilter(lambda record: Stamp("desk", from_value("id")(record)), gaps=Gaps.REFUSE)
only_strict = DedupPolicy(default=False, namespaces={"strict": True})

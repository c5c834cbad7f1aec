"""The event ids that the filters of a flow extract from records: of headers, of fields of the payload, or of both."""

from collections.abc import Mapping, Sequence
from typing import Any

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import Flow
from aggregations.definition.judging import Judging
from aggregations.per_message.ledger import Ledger
from aggregations.per_message.loop import MessageLoop
from aggregations.report import Report
from envelope import EnvelopeError
from envelope.filters.event_ids import EventIdFilter
from envelope.filters.interval import IntervalFilter
from jobs.explaining.filters import Nobody
from jobs.tracing import Place


class Identities:
    """Extracts the event ids of records.

    Args:
        flow: The flow.
        topic_ids: Current id by topic.
    """

    def __init__(self, flow: Flow[Any], topic_ids: Mapping[str, str]) -> None:
        judging = [stage.aggregate.fold for stage in flow.stages if isinstance(stage.aggregate.fold, Judging)]
        self._rules = [
            one.rule
            for one in judging
            if isinstance(one.rule, EventIdFilter) or (isinstance(one.rule, IntervalFilter) and one.rule.id is not None)
        ]
        self._flow = flow
        self._loop = MessageLoop(flow, Ledger(flow.name), topic_ids, Nobody(), Report(), 1)

    def of(self, records: Sequence[Record]) -> dict[Place, set[str]]:
        """The ids of some records, as text, by their coordinates; without records that have none or cannot be read."""
        found: dict[Place, set[str]] = {}
        if not self._rules:
            return found
        for arrival in self._loop.enter(self._flow.stages[0], self._loop.read(records)):
            element = arrival.element
            for rule in self._rules:
                if (text := _text_of(rule, element)) is not None:
                    found.setdefault(Place(element.topic, element.partition, element.offset), set()).add(text)
        return found


def _text_of(rule: EventIdFilter | IntervalFilter, element: Element[Any]) -> str | None:
    """The id of an element, as a person writes it; None if it has none."""
    assert rule.id is not None
    try:
        found = rule.id(element)
    except (EnvelopeError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return None if found is None else as_text(found)


def as_text(identity: Any) -> str:
    """An id as text: bytes as UTF-8, and the parts of a tuple with commas between them."""
    if isinstance(identity, tuple):
        return ",".join(map(as_text, identity))
    return identity.decode("utf-8", "replace") if isinstance(identity, bytes) else str(identity)

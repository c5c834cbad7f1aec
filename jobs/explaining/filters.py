"""What a filter of a flow decides about a record, after the records before it: they are judged again, from an empty state."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aggregations.definition.element import Element, Record
from aggregations.definition.flow import Flow
from aggregations.definition.judging import Judging
from aggregations.per_message.cause import Cause
from aggregations.per_message.judging import judge_stage
from aggregations.per_message.ledger import Entry, Ledger
from aggregations.per_message.loop import MessageLoop
from aggregations.per_message.stage import Decided
from aggregations.per_message.steps import RejectedElement
from aggregations.per_message.times import Times
from aggregations.report import Report
from envelope import EnvelopeError, Node, Verdict
from envelope.filters.arrival import Filter, extracted
from envelope.filters.event_ids import EventIdFilter
from envelope.filters.interval import IntervalFilter
from envelope.filters.producers import ProducerFilter, checked
from envelope.filters.sequence import SequenceFilter, sequence_number
from jobs.tracing import Place


class Judged(NamedTuple):
    """What a filter decides about a record.

    Attributes:
        verdict: The verdict.
        forward: Whether the record is passed on.
        cause: Why it is rejected; None if it is not.
        earlier: The record because of which it is dropped; None if it is not dropped, or that record is not known.
        exact: The flow has decided the same: the filter's state began with the first of the records.
    """

    verdict: Verdict
    forward: bool
    cause: Cause | None = None
    earlier: Place | None = None
    exact: bool = False


class Nobody:
    """Collects nothing."""

    def unread(self, own: Node, error: EnvelopeError, *, again: bool = True) -> None: ...
    def rejected(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None: ...
    def turned_away(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None: ...
    def decided(self, stage: str, decided: Iterable[Decided]) -> None: ...
    def published(self, filled: Iterable[Entry]) -> None: ...
    def tail(self, filled: Iterable[Entry], *, copies: int) -> None: ...


def has_filters(flow: Flow[Any]) -> bool:
    """Whether a flow begins with a filter: filters come before all other stages."""
    return bool(flow.stages) and flow.stages[0].aggregate.rule is not None


def times_of(flow: Flow[Any], topic_ids: Mapping[str, str], records: Iterable[Record]) -> Times:
    """The latest event times of some records of a partition, in order of offsets."""
    loop = MessageLoop(flow, Ledger(flow.name), topic_ids, Nobody(), Report(), 1)
    loop.read(records)
    return loop.times


def judged_again(
    flow: Flow[Any], topic_ids: Mapping[str, str], records: Iterable[Record], place: Place, *, whole: bool
) -> dict[str, Judged]:
    """What the filters of a flow decide about a record.

    Args:
        flow: The flow.
        topic_ids: Current id by topic, for roots without a topic id.
        records: The records of its partition before it, and the record.
        place: Its coordinates.
        whole: These are all, from the one at which the flow began.

    Returns:
        By stage; without the stages that it does not reach.
    """
    loop = MessageLoop(flow, Ledger(flow.name), topic_ids, Nobody(), Report(), 1)
    applied, found = loop.read(records), dict[str, Judged]()
    for stage in flow.stages:
        if not isinstance(stage.aggregate.fold, Judging):
            break
        arrivals = loop.enter(stage, applied)
        outcome = judge_stage(stage.aggregate, {}, arrivals, batch=1, siblings=flow.siblings)
        # A redriven record was judged with a ledger that is not known any more.
        known = not any(one.redriven is not None for one in arrivals)
        for number, one in enumerate(outcome.decided):
            if (own := one.arrival.element).offset != place.offset:
                continue
            verdict, forward, cause = one.decision.verdict, bool(one.emitted), outcome.rejected.get(number)
            passed = [
                other.arrival.element
                for other in outcome.decided[:number]
                if other.emitted and other.arrival.key == one.arrival.key
            ]
            earlier = None if forward or cause else _earlier(stage.aggregate.fold.rule, own, passed)
            at = None if earlier is None else Place(earlier.topic, earlier.partition, earlier.offset)
            judging = stage.aggregate.fold
            # Where nothing tells siblings apart, it matters which of them one batch has read.
            apart = not one.arrival.standing.ambiguous
            exact = whole and known and apart and not (judging.by_key or judging.spans)
            found[stage.name] = Judged(verdict, forward, cause, at, exact)
        applied = loop.onward(stage, outcome)
    return found


def _earlier(rule: Filter[Any], dropped: Element[Any], passed: Sequence[Element[Any]]) -> Element[Any] | None:
    """The element because of which a filter drops another one, among those of its state that it passed on."""
    own = _judged_by(rule, dropped)
    if own is None:
        return None
    for one in reversed(passed) if isinstance(rule, EventIdFilter | IntervalFilter) else passed:
        other = _judged_by(rule, one)
        if other is not None and _hides(rule, other, own):
            return one
    return None


def _judged_by(rule: Filter[Any], element: Element[Any]) -> Any:
    """What a filter judges an element by: its id, number or stamp; None if it has none, or is not known."""
    try:
        match rule:
            case EventIdFilter() | IntervalFilter():
                return rule.identity(element)
            case SequenceFilter():
                return sequence_number(extracted(rule.sequence, element, "sequence number"))
            case ProducerFilter():
                return checked(extracted(rule.stamp, element, "stamp"))
    except EnvelopeError:
        pass
    return None


def _hides(rule: Filter[Any], earlier: Any, own: Any) -> bool:
    """Whether an element is dropped because of an earlier one."""
    match rule:
        case SequenceFilter():
            return bool(earlier >= own)
        case ProducerFilter():
            later = earlier.end >= own.end or earlier.epoch > own.epoch
            return bool(earlier.producer == own.producer and later)
    return bool(earlier == own)

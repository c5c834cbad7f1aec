"""`Flow.deduplicate`: filters as steps of a flow."""

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from aggregations.definition.arguments import check_name, check_positive, check_type, located
from aggregations.definition.judging import Judging
from aggregations.definition.operators import Aggregate, FlatMap
from aggregations.errors import FlowError
from envelope.dedup.eviction import LANES
from envelope.dedup.history import WIDE
from envelope.filters.arrival import Filter
from envelope.filters.producers import Gaps, ProducerFilter
from envelope.filters.sequence_maps import EVERYWHERE, DedupPolicy

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow

T = TypeVar("T")

_METHODS = ("scope", "zero", "judge", "dump", "load")


class Deduplicating(Generic[T]):
    """The method of `Flow` that adds a filter."""

    def deduplicate(
        self,
        rule: Filter[Any],
        *,
        policy: DedupPolicy = EVERYWHERE,
        name: str = "",
        history: int | None = None,
        lanes: int = LANES,
        store: str = "",
    ) -> "Flow[T]":
        """Pass on the elements that a filter of `envelope.filters` passes on, unchanged, and drop its duplicates.

        It is a stage: its states are in a store, written in the order of the commit, and fenced. What the filter rejects
        goes to the dead-letter topic. It judges records, in the order of their offsets, so it comes before `flat_map` and
        `aggregate`. The records of one of its states must be in one partition, unless its ids are spread over states
        (`partitions=`): then records are shuffled by id, and after a crash the batch is repeated as it was.

        Args:
            rule: The filter. All its parameters but its name are part of the definition of this stage and of later ones.
            policy: Topics whose elements it judges. Those of other topics are passed on, as `unidentified`.
            name: Name of the stage; that of the filter when empty.
            history: Positions remembered per lane of a state; None for 1,024, or 32 of a filter by key.
            lanes: As for `aggregate`.
            store: URL of the store if no other is bound at run time.
        """
        flow = cast("Flow[T]", self)
        with located("deduplicate()"):
            _check_rule(rule)
            check_type("policy=", policy, DedupPolicy, "a DedupPolicy")
        name = name or rule.name
        check_name("stage", name)
        unjudged = tuple(sorted(topic for topic in flow.topics if not policy.enabled(topic)))
        judged = {topic: source for topic, source in flow.topics.items() if topic not in unjudged}
        judging = Judging(rule, unjudged)
        with located(f"filter {name!r}"):
            check_positive("history=", 1 if history is None else history)
            check_positive("lanes=", lanes)
            check_type("store=", store, str, "the URL of a store")
            if flow.branches:
                raise FlowError(f"it is in branch {flow.branches[-1]!r}: deduplicate before the branch")
            steps = [step for one in flow.inputs for step in one.steps] + list(flow.steps)
            if any(isinstance(step, FlatMap) for step in steps):
                raise FlowError("it judges records, not the items of a flat_map(): deduplicate before it")
            if any(isinstance(step, Aggregate) and step.rule is None for step in steps):
                raise FlowError("it judges records, not what a stage passes on: deduplicate before aggregate()")
            if judging.shares_topics and len(judged) > 1:
                raise FlowError(
                    "records of several topics would share its states. No order is certain between topics, so "
                    "after a crash a flow might pass on both of two duplicates: use a filter by partition, or publish to one "
                    "topic that another flow filters"
                )
            bare = [topic for topic, source in judged.items() if not source.envelope]
            if judging.reads_envelope and bare:
                raise FlowError(f"it reads envelopes, and topic {bare[0]} has none: extract from a header or a column")
            if judging.foreign:
                raise FlowError(
                    f"it reads {judging.foreign[0]} of envelopes, which elements do not have: extract from a header or a column"
                )
        names = {step.name for step in flow.steps if isinstance(step, Aggregate)}
        if name in {"end", *names, *flow.tables}:
            raise FlowError(f"flow {flow.name!r} already has a stage {name!r}; pass another name=")
        if history is None and not judging.by_key:
            history = WIDE  # a state has the disorder of all keys of a partition
        stage = Aggregate(name, judging.scope(), judging, not judging.spans, history=history, lanes=lanes, store=store)
        return flow._with(f"filter {name!r}", stage)


def _check_rule(rule: object) -> None:
    """Check the argument of `deduplicate`.

    Raises:
        FlowError: It is not a filter, or one that cannot be a step of a flow.
    """
    lacking = [method for method in _METHODS if not callable(getattr(rule, method, None))]
    if isinstance(rule, type) or lacking or not isinstance(getattr(rule, "name", None), str):
        raise FlowError(f"it takes a filter, such as SequenceFilter(from_value('id')); got {rule!r}")
    if isinstance(rule, ProducerFilter) and rule.gaps is Gaps.HOLD:
        raise FlowError(
            "gaps=Gaps.HOLD changes the order of records, and a flow recognises copies by the order of the source: a record "
            "that is passed on after many later ones would count as a copy. Use Gaps.REPORT or Gaps.REFUSE, or a StoredFilter "
            "before the flow's topic"
        )

"""The topology of a world: topics, processors between them, and the flow at their end. All functions are pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from aggregations.definition.aggregates import count, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope.filters import (
    Beyond,
    DedupPolicy,
    EventIdFilter,
    ProducerFilter,
    Scope,
    SequenceFilter,
    SessionWindows,
    TimeWindows,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
    from_value,
)
from tests.simulation.functions import (
    OUT,
    Aside,
    Emit,
    Keep,
    KeyOf,
    Marked,
    Payload,
    Refuse,
    Seen,
    Split,
    digest,
    kept_element,
)
from tests.simulation.sessions import TIME, WINDOW

FINAL = "t"
"""The topic that the flow reads."""
SECOND = "u"
"""A second source of the flow, in some worlds: a topic of plain payloads that producers write."""
FLOW = "simulated"
_FILTER = "once"
_YEAR = timedelta(days=365)
OVER_PARTITIONS = "over partitions"
CHANGED_KEY = "changed key"
SPREAD_IDS = "event id over partitions"
SPANNING = (OVER_PARTITIONS, CHANGED_KEY, SPREAD_IDS)
"""Filters that recognise what a producer writes again into any partition; only in flows."""
BY_KEY = ("event id by key", "sequence by key")
"""Filters with a state for each key; only in flows."""
ONE_TOPIC = "event id of one topic"
"""A filter that judges `FINAL` only, and not `SECOND`."""
SHORT = "short horizon"
"""A filter that remembers two ids."""
FILTERS: Mapping[str, Any] = {
    "event id": EventIdFilter(from_value("id"), horizon=_YEAR, name=_FILTER),
    "interval": deduplicate_by_key_value(from_value("id"), _YEAR, name=_FILTER),
    "sequence": SequenceFilter(from_value("n"), name=_FILTER),
    "producer": ProducerFilter(name=_FILTER),
    OVER_PARTITIONS: deduplicate(from_value("id"), _YEAR, partitions=2, name=_FILTER),
    CHANGED_KEY: deduplicate_by_key(_YEAR, key=from_value("id"), partitions=2, name=_FILTER),
    SPREAD_IDS: EventIdFilter(from_value("id"), horizon=_YEAR, partitions=2, name=_FILTER),
    "event id by key": EventIdFilter(from_value("id"), horizon=_YEAR, scope_by=Scope.KEY, name=_FILTER),
    "sequence by key": SequenceFilter(from_value("n"), scope_by=Scope.KEY, name=_FILTER),
    ONE_TOPIC: EventIdFilter(from_value("id"), horizon=_YEAR, name=_FILTER),
    # The number is the time. Numbers ascend, so what is at or below the floor is a copy.
    SHORT: EventIdFilter(
        from_value("id"), timedelta(0), limit=2, beyond=Beyond.DROP, time=from_value("n"), name=_FILTER
    ),
    # Each event has a window, or a session, of its own.
    "distinct": distinct(TimeWindows(timedelta(milliseconds=1), grace=_YEAR), time=from_value("n"), name=_FILTER),
    "sessions": distinct(SessionWindows(timedelta(0), grace=_YEAR), time=from_value("n"), name=_FILTER),
}
"""Filters that recognise what a producer writes twice. All that have no ids need the numbers of the producers' topics."""
COLUMNS = {"id": str, "k": str, "g": str, "h": str, "x": int, "n": int, "bad": str, "fixed": str}


@dataclass(frozen=True, slots=True)
class Processor:
    """A republish service.

    Attributes:
        name: Its name.
        source: Topic it reads.
        target: Topic it writes.
        rekey: `keep`, `change`, or `mixed`: by content.
        fan: 1 for one output per input, otherwise the maximum; the content determines the number.
        spread: It writes without a key, so to any partition, to another one in every life.
        foreign: It writes neither fan-out index nor topic id.
        retries: Number of its retry topics. Some inputs pass through them; which ones differs between attempts.
        refusing: Some inputs are rejected in every attempt.
        plain: It forwards everything unchanged.
        raw: It reads payloads without envelopes.
        static: Its members are static members of their group.
        also: A second topic that it writes; the content determines which outputs. Empty for none.
        members: Number of simultaneous members of its group.
        deduplicates: It has this one of `FILTERS`; empty for none.
    """

    name: str
    source: str
    target: str
    rekey: str = "keep"
    fan: int = 1
    spread: bool = False
    foreign: bool = False
    retries: int = 0
    refusing: bool = False
    plain: bool = False
    raw: bool = False
    static: bool = False
    also: str = ""
    members: int = 1
    deduplicates: str = ""

    @property
    def targets(self) -> list[str]:
        """The topics that it writes."""
        return [self.target, *([self.also] if self.also else [])]

    def target_of(self, output: Payload) -> str:
        """The topic that one of its outputs goes to."""
        return self.targets[digest(output["id"], "to") % len(self.targets)]

    @property
    def retry_topics(self) -> list[str]:
        """Its retry topics, in their order."""
        return [f"{self.name}.retry{i}" for i in range(self.retries)]

    def retries_behind(self, topic: str) -> list[str]:
        """Retry topics that a record of one of its topics may go to."""
        topics = [self.source, *self.retry_topics]
        return topics[topics.index(topic) + 1 :]

    @property
    def dead(self) -> str:
        """Its dead-letter topic."""
        return f"{self.name}.dead"

    def refuses(self, payload: Payload) -> bool:
        """Whether it rejects an input."""
        if not self.refusing or self.name in payload["fixed"].split():
            return False
        return digest(payload["id"], self.name, "refused") % 6 == 0

    def outputs(self, payload: Payload) -> list[Payload]:
        """Its outputs for an input that it accepts."""
        if self.plain:
            return [payload]
        source = payload["id"]
        many = 1 if self.fan == 1 else digest(source, self.name) % (self.fan + 1)
        return [self._output(payload, f"{source}/{self.name}.{i}") for i in range(many)]

    def _output(self, payload: Payload, name: str) -> Payload:
        changes = self.rekey == "change" or (self.rekey == "mixed" and digest(name) % 2 == 0)
        key = f"{self.name}{digest(name, 'k') % 3}" if changes else payload["k"]
        return {**payload, "id": name, "k": key}


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of the flow.

    Attributes:
        name: Its name.
        key: Column that it is keyed by; `k` is the record's key.
        seen: Its fold remembers every id; otherwise it counts and sums.
        flat: There is a flat-map before it.
        emits: It emits two items per element.
        fails: What rejects some elements before it, when their key is not yet known: a `map`, a `filter`, its `flat_map`,
            its `key`, or a `divert` for single items; empty for nothing.
        emit_fails: Its `emit` fails for some elements.
    """

    name: str
    key: str
    seen: bool = True
    flat: bool = False
    emits: bool = False
    fails: str = ""
    emit_fails: bool = False

    @property
    def bad_in_front(self) -> str:
        """The mark of a payload that is rejected before it."""
        return f"!{self.name}"

    @property
    def bad_in_emit(self) -> str:
        """The mark of a payload for which its `emit` fails."""
        return f"^{self.name}"


@dataclass(frozen=True)
class Spec:
    """A world to simulate.

    Attributes:
        roots: Topics that producers write.
        partitions: Partitions by topic.
        processors: Republish services.
        stages: Stages of the flow.
        history: Positions remembered per lane; None for the default, which depends on the lane.
        lanes: Lanes with a history per state.
        split: Number of stages in the first store; all when it is the number of stages.
        growth: Topics may get partitions: `drained` when nothing is in progress, `undrained` at any time, or empty;
            `lagging` the flow's topic at any time, others when nothing is in progress.
        recreates: Topics may be deleted and created again, when nothing is in progress.
        reorders: Services' producers may swap neighbours.
        filters: The flow filters out some elements.
        publishes: The flow publishes to a topic: the output of its last stage, or what `publishes_before` says.
        publishes_before: Name of the stage before which it publishes; empty for after the last stage.
        keyless: Producers of the roots write no key, and services that keep the key write none.
        audit: Topic that a second flow reads; empty for none.
        revives: Records that republishers reject are redriven to them.
        second: The flow also reads `SECOND`.
        sessions: The stages have sessions.
        deduplicates: This one of `FILTERS` comes before all stages of the flow; empty for none.
        mends: From some moment on the flow accepts what it rejected: a copy may fill a hole before the redriven record.
        aside: What it publishes before a stage is published by a branch; if a filter fails before that stage, in it.
        repairs: States are spoiled, and an operator mends them by their keys.
        rebuilds: An operator rebuilds the states, swaps generations, and returns to the one before.
        cuts: Logs lose their newest records, and give their offsets to new ones.
        streamed: Spark delivers the flow's records, by a checkpoint of which this is the seed; 0 if the flow reads them.
        folds: False for a flow without a stage: its only `stages` entry, `end`, names what its steps make of an element.
    """

    roots: tuple[str, ...]
    partitions: Mapping[str, int]
    processors: tuple[Processor, ...]
    stages: tuple[StageSpec, ...]
    history: int | None
    lanes: int
    split: int
    growth: str = ""
    recreates: bool = False
    reorders: bool = False
    filters: bool = False
    publishes: bool = False
    publishes_before: str = ""
    keyless: bool = False
    audit: str = ""
    revives: bool = False
    mends: bool = False
    folds: bool = True
    aside: bool = False
    second: bool = False
    sessions: bool = False
    deduplicates: str = ""
    repairs: bool = False
    rebuilds: bool = False
    cuts: bool = False
    streamed: int = 0

    @property
    def sources(self) -> tuple[str, ...]:
        """Topics that the flow reads."""
        return (FINAL, SECOND) if self.second else (FINAL,)

    def spreads(self, topic: str) -> bool:
        """Whether a topic gets records without a key, which may go to any partition."""
        return self.keyless or any(processor.spread and topic in processor.targets for processor in self.processors)

    @cached_property
    def flow(self) -> Flow[Any]:
        """The flow under test."""
        time = TIME if self.sessions else None
        sources = [
            Topic(topic, Json(COLUMNS), envelope=topic == FINAL, time=time, ahead="1d") for topic in self.sources
        ]
        flow: Flow[Any] = Flow(FLOW).source(*sources)
        if self.filters:
            flow = flow.filter(kept_element)
        if self.deduplicates:
            policy = DedupPolicy(default=True, topics={SECOND: self.deduplicates != ONE_TOPIC})
            rule = FILTERS[self.deduplicates]
            flow = flow.deduplicate(rule, policy=policy, history=self.history, lanes=self.lanes)
        for stage in self.stages:
            refuse, bad = Refuse(stage.bad_in_front), Marked(stage.bad_in_front)
            if stage.flat:
                flow = flow.flat_map(Split(refuse if stage.fails == "flat_map" else None))
            aside = self.aside and stage.name == self.publishes_before
            if aside:
                flow = flow.also_to("aside", Aside(refuse if stage.fails == "filter" else None))
            elif stage.name == self.publishes_before:
                flow = flow.publish(OUT, key="g")
            if stage.fails == "map":
                flow = flow.map(refuse)
            elif stage.fails == "filter" and not aside:
                flow = flow.filter(Keep(refuse))
            elif stage.fails == "divert":
                flow = flow.divert(bad)
            if not self.folds:
                flow = flow.filter(Keep(Refuse(stage.name)))
                continue
            fold = Seen(stage.name) if stage.seen else Fields(n=count(), s=total("x"))
            flow = flow.aggregate(
                stage.name,
                KeyOf(stage.key, refuse) if stage.fails == "key" else stage.key,
                fold,
                co_partitioned=not self.spreads(FINAL),
                history=self.history,
                lanes=self.lanes,
                emit=Emit(Refuse(stage.bad_in_emit) if stage.emit_fails else None) if stage.emits else None,
                window=WINDOW if self.sessions else None,
            )
        return flow.publish(OUT, key="g") if self.publishes and not self.publishes_before else flow

    def urls(self, name: str) -> dict[str, str]:
        """URL of the store by stage: of that name, or after the split of a second one."""
        found = {_FILTER: name} if self.deduplicates else {}
        return found | {stage.name: name if i < self.split else f"{name}.down" for i, stage in enumerate(self.stages)}

    def key_of(self, payload: Payload) -> bytes | None:
        """Key of an event as its producer writes it."""
        return None if self.keyless else payload["k"].encode()

    def twice(self, topic: str, payload: Payload) -> bool:
        """Whether a producer writes an event of a topic twice: if all that read it, or the flow, have a filter."""
        judged = self.deduplicates != ONE_TOPIC or topic != SECOND
        filtered = (bool(self.deduplicates) and judged) or topic in self.filtered_roots
        return filtered and digest(payload["id"], "twice") % 3 == 0

    def partition_of_copy(self, payload: Payload) -> int | None:
        """Where a producer writes an event again; None for the key's partition."""
        return digest(payload["id"], "again") if self.deduplicates in SPANNING else None

    @cached_property
    def filtered_roots(self) -> frozenset[str]:
        """The topics of producers that only services with a filter read."""
        bare = {*self.sources, self.audit, *(one.source for one in self.processors if not one.deduplicates)}
        return frozenset({*self.roots} - bare)

    def is_raw(self, topic: str) -> bool:
        """Whether a topic contains payloads without envelopes."""
        return topic == SECOND or any(processor.raw and processor.source == topic for processor in self.processors)

    def messages(self, topic: str, payload: Payload) -> Iterator[Payload]:
        """The logical messages that reach the flow's sources because of a message in `topic`."""
        if topic in self.sources:
            yield payload
        for processor in self.processors:
            if processor.source == topic and not processor.refuses(payload):
                for output in processor.outputs(payload):
                    yield from self.messages(processor.target_of(output), output)

    def refused(self, topic: str, payload: Payload) -> Iterator[tuple[str, str]]:
        """Dead-letter topic and id of the messages that republishers reject because of a message in `topic`."""
        for processor in self.processors:
            if processor.source == topic:
                if processor.refuses(payload):
                    yield processor.dead, payload["id"]
                else:
                    for output in processor.outputs(payload):
                        yield from self.refused(processor.target_of(output), output)


def event(spec: Spec, name: str) -> Payload:
    """The event of that name. One in four is bad for a stage, before it, or for its `emit`."""
    stage = spec.stages[digest(name, "bad") % len(spec.stages)]
    marks = ("", stage.name, stage.bad_in_front, stage.bad_in_front, stage.bad_in_emit)
    return {
        "id": name,
        "k": f"k{digest(name, 'k') % 3}",
        "g": f"g{digest(name, 'g') % 2}",
        "h": "h",
        "x": digest(name, "x") % 100,
        "n": int(name.rpartition("e")[2]),
        "fixed": "",
        "bad": marks[max(digest(name, "poison") % 16 - 11, 0)],
    }

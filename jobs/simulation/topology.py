"""What a seed draws: topics, passages between them, and the flow at their end. All functions of content alone."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

from aggregations.element import Element
from aggregations.fields import Fields, count, total
from aggregations.flow import Flow
from aggregations.source import Json, Topic
from envelope.windows import LANES

FINAL = "t"
"""The topic that the flow reads."""
FLOW = "simulated"
COLUMNS = {"id": str, "k": str, "g": str, "h": str, "x": int, "bad": str}

_PRIME = 65521

Payload = dict[str, Any]
"""`id` says which logical message it is: the root's id and what every passage made of it."""


def digest(*texts: str) -> int:
    """A number that depends on the texts alone.

    CRC-32 is linear: of texts that differ in one bit all results differ in the same bits, or in none of the lowest
    ones. Behind the remainder of a prime they do not.
    """
    return zlib.crc32("|".join(texts).encode()) % _PRIME


@dataclass(frozen=True, slots=True)
class Passage:
    """A republish service.

    Attributes:
        name: Its name.
        source: Topic it reads.
        target: Topic it writes.
        rekey: `keep`, `change`, or `mixed`: by content.
        fan: 1 for one output per input, else the most outputs; how many is a matter of content.
        spread: It writes without a key, so to any partition, another one in every life.
        foreign: It writes neither fan-out index nor topic id.
        retries: Number of its retry topics. Some inputs go through them first, which ones differs from try to try.
        refusing: Some inputs are refused, in every try.
        plain: It passes everything on as it is.
        raw: It reads payloads without envelopes.
        static: Its members are static members of their group.
        also: A second topic that it writes, which outputs is a matter of content; empty for none.
        members: Members of its group that work at the same time.
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
        """Whether an input is none that it can use."""
        return self.refusing and digest(payload["id"], self.name, "refused") % 6 == 0

    def outputs(self, payload: Payload) -> list[Payload]:
        """What it makes of an input that it can use."""
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
        flat: A flat-map stands in front of it.
        emits: It emits two items per element.
        checks: A step in front of it refuses some elements, before their key is known.
    """

    name: str
    key: str
    seen: bool = True
    flat: bool = False
    emits: bool = False
    checks: bool = False


@dataclass(frozen=True)
class Spec:
    """A world to simulate.

    Attributes:
        roots: Topics that producers write.
        partitions: Partitions by topic.
        passages: Republish services.
        stages: Stages of the flow.
        window: Positions remembered per lane; None for the default, which depends on the lane.
        lanes: Lanes with a window per state.
        split: Number of stages in the first store; all when it is the number of stages.
        growth: Topics may get partitions: `drained` when nothing is under way, `undrained` at any time, or empty;
            `lagging` the flow's topic at any time, others when nothing is under way.
        recreates: Topics may be deleted and created again, when nothing is under way.
        reorders: Services' producers may swap neighbours.
        filters: The flow leaves some elements out.
        publishes: The flow produces what comes out of its last stage to a topic.
        keyless: Producers of the roots write no key, and services that keep the key pass none on.
    """

    roots: tuple[str, ...]
    partitions: Mapping[str, int]
    passages: tuple[Passage, ...]
    stages: tuple[StageSpec, ...]
    window: int | None
    lanes: int
    split: int
    growth: str = ""
    recreates: bool = False
    reorders: bool = False
    filters: bool = False
    publishes: bool = False
    keyless: bool = False

    @cached_property
    def flow(self) -> Flow[Any]:
        """The flow under test."""
        flow: Flow[Any] = Flow(FLOW).source(Topic(FINAL, Json(COLUMNS)))
        if self.filters:
            flow = flow.filter(_kept)
        # Without a key any partition may be the next one.
        spread = self.keyless or any(passage.spread and FINAL in passage.targets for passage in self.passages)
        for stage in self.stages:
            if stage.flat:
                flow = flow.flat_map(_split)
            if stage.checks:
                flow = flow.map(Check(stage.name))
            fold = Seen(stage.name) if stage.seen else Fields(n=count(), s=total("x"))
            flow = flow.aggregate(
                stage.name,
                stage.key,
                fold,
                co_partitioned=not spread,
                window=self.window,
                lanes=self.lanes,
                emit=_emit if stage.emits else None,
            )
        return flow.publish("out", key="g") if self.publishes else flow

    def is_raw(self, topic: str) -> bool:
        """Whether a topic holds payloads without envelopes."""
        return any(passage.raw and passage.source == topic for passage in self.passages)

    def messages(self, topic: str, payload: Payload) -> Iterator[Payload]:
        """The logical messages that reach the flow's topic because of a message in `topic`."""
        if topic == FINAL:
            yield payload
        for passage in self.passages:
            if passage.source == topic and not passage.refuses(payload):
                for output in passage.outputs(payload):
                    yield from self.messages(passage.target_of(output), output)

    def refused(self, topic: str, payload: Payload) -> Iterator[tuple[str, str]]:
        """Dead-letter topic and id of what republishers refuse because of a message in `topic`."""
        for passage in self.passages:
            if passage.source == topic:
                if passage.refuses(payload):
                    yield passage.dead, payload["id"]
                else:
                    for output in passage.outputs(payload):
                        yield from self.refused(passage.target_of(output), output)


class Check:
    """Refuses what is bad in front of a stage."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, element: Element[Any]) -> Payload:
        if element["bad"] == f"!{self.name}":
            raise ValueError("bad in front of this stage")
        payload: Payload = element.value
        return payload


class Seen:
    """Counts how often each id was folded, and refuses messages that are bad for its stage."""

    def __init__(self, name: str) -> None:
        self.name = name

    def zero(self) -> dict[str, int]:
        return {}

    def fold(self, state: dict[str, int], element: Element[Any]) -> dict[str, int]:
        state[element["id"]] = state.get(element["id"], 0) + 1
        if element["bad"] == self.name:
            raise ValueError("bad for this stage")
        return state


def kept(payload: Payload) -> bool:
    """Whether the flow's filter keeps it."""
    return bool(payload["x"] % 5)


def split(payload: Payload) -> list[Payload]:
    """What the flat-map makes of it. What is bad is bad in the last item only."""
    name, many = payload["id"], digest(payload["id"]) % 4
    return [
        {**payload, "id": f"{name}!{i}", "k": f"s{i}", "bad": payload["bad"] if i == many - 1 else ""}
        for i in range(many)
    ]


def emitted(payload: Payload) -> list[Payload]:
    """What a stage that emits makes of it."""
    return [{**payload, "id": f"{payload['id']}^{i}", "g": f"{payload['g']}{i}"} for i in range(2)]


def _kept(element: Element[Any]) -> bool:
    return kept(element.value)


def _split(element: Element[Any]) -> list[Payload]:
    return split(element.value)


def _emit(element: Element[Any], state: Any) -> list[Payload]:
    return emitted(element.value)


def draw(random: Random) -> Spec:
    """Draw a world."""
    trouble = random.choice([""] * 10 + ["spread", *["retries"] * 3, "foreign", "reorders", "undrained"])
    # A key that is kept all the way is the ordinary case, with rules of its own.
    kept_key = random.random() < 0.35
    roots, passages = _draw_passages(random, trouble, kept_key)
    topics = sorted({FINAL, *roots, *(passage.source for passage in passages)})
    drained = random.random() < (0.8 if kept_key else 0.2)
    growth = trouble if trouble == "undrained" else "drained" if drained else ""
    lags = kept_key and growth == "drained" and bool(passages)
    # So is a flow that is keyed as its topic is, whatever the services before it did.
    stages = _draw_stages(random, kept_key or random.random() < 0.6)
    keyless = not growth and random.random() < 0.3
    # What a service re-sends without a key goes to any partition; the first one that gives it a key ends that.
    scattered = keyless and any(one.rekey != "change" or one.spread for one in passages if one.source in roots)
    # Where first deliveries rise in every lane, and no message ever changes its lane, the smallest window is enough:
    # siblings without an index come in any order, but a window counts their roots.
    disorder = trouble not in ("", "foreign") or (bool(growth) and not kept_key) or scattered
    window = 512 if disorder else random.choice([1, 1, 1, 2, 3, 32])
    spec = Spec(
        roots=roots,
        partitions={topic: random.choice([1, 2, 2, 3]) for topic in topics},
        passages=passages,
        stages=stages,
        window=None if trouble == "spread" else window,
        lanes=LANES if disorder or growth else random.choice([1, 2, LANES]),
        split=random.choice([len(stages), random.randint(1, len(stages)), random.randint(1, len(stages))]),
        growth=growth,
        recreates=trouble != "foreign" and random.random() < 0.25,
        reorders=trouble == "reorders",
        filters=random.random() < 0.2,
        publishes=random.random() < 0.3,
        keyless=keyless,
    )
    spec = spec if trouble or random.random() < 0.6 else _other(random, spec)
    return replace(spec, growth="lagging") if lags and random.random() < 0.9 else spec


def _other(random: Random, spec: Spec) -> Spec:
    """One passage is of another kind than ours, or writes without a key."""
    ours = [one for one in spec.passages if not (one.plain or one.raw)]
    if not ours or spec.growth or spec.keyless:
        return spec
    one = random.choice(ours)
    passages = list(spec.passages)
    if random.random() < 0.5:
        passages[passages.index(one)] = replace(one, foreign=True, fan=5, rekey="keep")
        return replace(spec, passages=tuple(passages), window=1, recreates=False)
    passages[passages.index(one)] = replace(one, spread=True)
    return replace(spec, passages=tuple(passages), window=None, lanes=LANES)  # a retired lane holds nothing


def _draw_passages(random: Random, trouble: str, kept_key: bool) -> tuple[tuple[str, ...], tuple[Passage, ...]]:
    shape = random.choice(["direct", "line", "line", "line", "line", "diamond", "roots"])
    if shape == "direct":
        return (FINAL,), ()
    count = {"line": random.choice([1, 2, 2, 2, 3]), "diamond": 2, "roots": 2}[shape]
    topics = ["r0", *(f"m{i}" for i in range(1, count)), FINAL]
    troubled = random.randrange(count)
    ends = [(f"p{i}", topics[i], topics[i + 1]) for i in range(count)]
    roots: tuple[str, ...] = ("r0",)
    if shape == "diamond":
        twin = random.randrange(count)
        ends.append(("q", topics[twin], topics[twin + 1]))
    if shape == "roots":
        roots = ("r0", "r1")
        ends.append(("q", "r1", random.choice(topics[1:])))
    raw = [root for root in roots if random.random() < 0.3 and root != FINAL]
    passages = [
        Passage(
            *end,
            rekey="keep" if kept_key else random.choice(["keep", "change", "change", "mixed"]),
            fan=random.choice([1, 1, 2, 3] if trouble != "foreign" else [2, 3]),
            spread=trouble == "spread" and i == troubled,
            foreign=trouble == "foreign" and i == troubled,
            retries=random.choice([0, 1, 1, 2]) if trouble == "retries" else 0,
            refusing=random.random() < 0.2,
            raw=end[1] in raw,
            static=random.random() < 0.3,
            also=FINAL if end[2] != FINAL and random.random() < 0.3 else "",
            members=random.choice([1, 1, 2, 3]),
        )
        for i, end in enumerate(ends)
    ]
    # Two that leave a message as it is would make two of it that nothing but their paths could tell apart.
    same = [one for one in passages if one.rekey == "keep" and one.fan == 1] if shape != "diamond" else []
    for one in same:
        if not (one.spread or one.retries or one.also) and random.random() < 0.5:
            passages[passages.index(one)] = replace(one, refusing=False, plain=True)
    return roots, tuple(passages)


def _draw_stages(random: Random, kept_key: bool) -> tuple[StageSpec, ...]:
    count = random.choice([1, 2, 2, 3])
    # What only counts refuses nothing, and whether it has a message nobody could tell an operator.
    counting = random.choice([0] * 6 + [1])
    return tuple(
        StageSpec(
            f"s{i}",
            key="k" if kept_key else random.choice(["k", "k", "g", "h"]),
            seen=i >= counting,
            flat=not kept_key and random.random() < 0.25,
            emits=i + 1 < count and random.random() < 0.2,
            checks=i >= counting and random.random() < 0.3,
        )
        for i in range(count)
    )

"""Chains through retry topics: named by the reader, they read as if the sender had marked the hops."""

import json
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Envelope, Hop, Lineage, Node, encode
from envelope.dedup.retries import Retries
from tests.support.both import TOPIC_ID, Both

RETRIES = {"a": "a-retry-*", "b": ["b.again", "b-later-?"], "c": "c-retry-*"}
NAMES = {"a": ["a-retry-0", "a-retry-10"], "b": ["b.again", "b-later-1"], "c": ["c-retry-"], "d": []}

steps = st.fixed_dictionaries(
    {
        "via": st.sampled_from(["r", "s"]),
        "index": st.none() | st.integers(0, 3),
        "rekeyed": st.booleans(),
        "keyless": st.booleans(),
        "topic_id": st.sampled_from(["", "id"]),
    }
)


@st.composite
def routes(draw: st.DrawFn) -> tuple[list[tuple[str, int, dict[str, Any]]], list[list[str]]]:
    """Topics with partitions and the step behind each, and the detour that the record takes at each, if any."""
    path = draw(st.permutations("abcd").map(lambda names: names[: draw(st.integers(1, 4))]))
    nodes = [(name, draw(st.integers(0, 2)), draw(steps)) for name in path]
    detours = []
    for name in path:
        there = draw(st.lists(st.sampled_from([*NAMES[name], name]), max_size=3)) if NAMES[name] else []
        # A topic that is written to itself would be a loop.
        detours.append([one for i, one in enumerate(there) if one != name or (i and there[i - 1] != name)])
    return nodes, detours


def chain_of(
    nodes: list[tuple[str, int, dict[str, Any]]], detours: list[list[str]], *, marked: bool
) -> tuple[tuple[Hop, ...], Node]:
    hops: list[Hop] = []
    own = Node("", 0, 0)
    for depth, ((name, partition, step), detour) in enumerate(zip(nodes, detours, strict=True)):
        places = [(name, partition, depth), *((one, 7, 100 + i) for i, one in enumerate(detour))]
        for topic, at, offset in places[:-1]:
            hops.append(Hop(topic, at, offset, via="retrier", index=9, rekeyed=True, keyless=True, pass_through=marked))
        topic, at, offset = places[-1]
        if depth == len(nodes) - 1:
            own = Node(topic, at, offset)
        else:
            hops.append(Hop(topic, at, offset, **step))
    return tuple(hops), own


@given(routes())
def test_a_chain_through_retry_topics_reads_as_the_one_whose_hops_are_marked(
    route: tuple[list[tuple[str, int, dict[str, Any]]], list[list[str]]],
) -> None:
    nodes, detours = route
    plain, own = chain_of(nodes, detours, marked=False)
    declared, _ = chain_of(nodes, detours, marked=True)
    chain = Retries.of(RETRIES).marked(plain, own.topic)
    assert chain == declared
    line = Lineage.of(chain, own).check()
    direct = Lineage.of(*chain_of(nodes, [[] for _ in nodes], marked=False))
    assert [(node.topic, node.partition, node.offset) for node in line.reduced().nodes] == [
        (node.topic, node.partition, node.offset) for node in direct.nodes
    ]
    assert [(edge.via, edge.index) for edge in line.reduced().edges] == [
        (edge.via, edge.index) for edge in direct.edges
    ]
    assert line.standing().position == direct.standing().position


class Shop:
    """A foreign service that makes one or two outputs of each order, tries failed ones again, and crashes.

    It commits nothing of what it reads between two crashes, so it sends that again, and a record may fail this time.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.sent: list[tuple[tuple[Hop, ...], int]] = []
        self._written = dict.fromkeys(("raw-retry-0", "raw-retry-1"), 0)
        self._waiting: list[tuple[str, int, tuple[Hop, ...], int]] = []

    def work(self, orders: int) -> None:
        done = 0
        while done < orders or self._waiting:
            until = min(done + self._random.randint(1, 4), orders)
            for _ in range(self._random.choice([1, 1, 2])):
                for order in range(done, until):
                    self._handle("raw", order, (), order)
            done = until
            batch = self._waiting[: self._random.randint(0, 3)] if done < orders else list(self._waiting)
            for _ in range(self._random.choice([1, 1, 2])):
                for one in batch:
                    self._handle(*one)
            self._waiting = self._waiting[len(batch) :]

    def _handle(self, topic: str, offset: int, chain: tuple[Hop, ...], order: int) -> None:
        following = {"raw": "raw-retry-0", "raw-retry-0": "raw-retry-1"}.get(topic)
        if following and self._random.random() < 0.4:
            at = self._written[following]
            self._written[following] += 1
            self._waiting.append((following, at, (*chain, Hop(topic, 0, offset, via="retrier")), order))
            return
        for index in range(1 + order % 2):
            self.sent.append(((*chain, Hop(topic, 0, offset, via="till", index=index)), order))


def flow(retries: Any) -> Flow[Any]:
    source = Topic("enriched", Json({"cents": int}), retries=retries)
    return Flow("f").source(source).aggregate("a", "_key", Fields(n=count(), cents=total("cents")))


def counted(sent: list[tuple[tuple[Hop, ...], int]], random: Random, retries: Any) -> dict[bytes, dict[str, int]]:
    """What a flow counts of what was sent, in batches of any size, on both paths."""
    both, left = Both(flow(retries)), list(enumerate(sent))
    while left:
        size = random.randint(1, 8)
        batch, left = left[:size], left[size:]
        both.process(
            [
                Record(
                    *("enriched", 0, offset, b"%d" % (order % 3)),
                    encode(Envelope(json.dumps({"cents": order}).encode(), chain)),
                    topic_id=TOPIC_ID,
                )
                for offset, (chain, order) in batch
            ]
        )
    assert not both.dead_letters
    return both.results("a")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30))
def test_a_service_with_retry_topics_that_crashes_and_sends_again_is_counted_exactly(seed: int, orders: int) -> None:
    random = Random(seed)
    shop = Shop(random)
    shop.work(orders)
    wanted: dict[bytes, dict[str, int]] = {}
    for order in range(orders):
        mine = wanted.setdefault(b"%d" % (order % 3), {"n": 0, "cents": 0})
        mine["n"] += 1 + order % 2
        mine["cents"] += order * (1 + order % 2)
    assert counted(shop.sent, random, {"raw": "raw-retry-*"}) == wanted


def test_the_same_service_is_counted_more_than_once_if_its_retry_topics_are_not_named() -> None:
    shop = Shop(Random(1))
    shop.work(30)
    named, unnamed = (
        sum(one["n"] for one in counted(shop.sent, Random(2), retries).values())
        for retries in ({"raw": "raw-retry-*"}, None)
    )
    assert named == 45
    assert unnamed > named

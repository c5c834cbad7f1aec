"""Runs of a flow with a filter, killed at every step of their commits, on real stores: the oracle is the filter alone."""

import json
import random
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path as File

import pytest

from envelope import Envelope, decode, encode
from envelope.filters import FilterStates
from persistence.cassandra import apply_schema
from persistence.commit.faults import LEDGER, Fault, FaultOutcome
from tests.support.flows import ASTRAY, BARE, FILTERS, OVER_PARTITIONS, filtered
from tests.support.runs import BUCKETS, EVERY, ONE_NODE, Jvm, Run, commit_faults
from tests.support.world import Sent, World

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Each kind of filter on one of the stores: what a store guarantees is its contract's subject, not the filters'.
KINDS = {
    "column": "redis and sqlite",
    "sequence by key": "cassandra",
    "producer": "redis and sqlite",
    "event id": "cassandra",
    "interval": "redis and sqlite",
    OVER_PARTITIONS: "redis and sqlite",
    "changed key": "redis and sqlite",
    "event id over partitions": "redis and sqlite",
    "session": "cassandra",
    "own class": "redis and sqlite",
}


@pytest.fixture
def urls(request: pytest.FixtureRequest, tmp_path: File) -> dict[str, str]:
    """URL of the store by stage name."""
    if KINDS[request.getfixturevalue("kind")] == "cassandra":
        keyspace = f"filters_{uuid.uuid4().hex[:8]}"
        url = f"{request.getfixturevalue('cassandra_url')}/{keyspace}?replication=1&buckets={BUCKETS}"
        apply_schema(url)
        return {"filter": url, "incident": url}
    redis = f"{request.getfixturevalue('redis_url')}?buckets={BUCKETS}&prefix=filters-{uuid.uuid4().hex[:8]}"
    return {"filter": redis, "incident": f"sqlite://{tmp_path}/states.db"}


@pytest.fixture
def world(kafka: str, topic: Callable[..., str], tmp_path: File, urls: dict[str, str]) -> Iterator[World]:
    with closing(World(kafka, topic(partitions=2, name="legs"), topic(name="dead"), tmp_path, urls=urls)) as world:
        yield world


def batches(kind: str, count: int) -> list[list[Sent]]:
    """Messages that a producer sends; before each batch it sends some of the last ones again.

    If the filter looks in all partitions, it sends them into another one.
    """
    draw, number, made, last = random.Random(3), 0, [], list[Sent]()
    for _ in range(count):
        new = []
        for _ in range(12):
            number += 1
            key, payload = draw.choice([b"A", b"B", b"C", b"D"]), json.dumps({"id": number}).encode()
            message = Envelope(payload, key=key, event_id=f"i{number}", producer="desk", sequence=number)
            new.append(Sent(payload if kind in BARE else encode(message), key, partition=key[0] % 2))
        made.append([*last, *new])
        last = [replace(one, partition=one.partition ^ (kind in ASTRAY)) for one in new[-5:]]
    return made


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "producer" else pytest.mark.kills) for kind in KINDS]
)
@pytest.mark.parametrize("every", EVERY)
def test_a_run_that_is_killed_folds_what_the_filter_alone_passes_on(
    world: World, kind: str, urls: dict[str, str], every: int
) -> None:
    killed(world, kind, urls, every=every)


@pytest.mark.spark
@pytest.mark.kills
@pytest.mark.parametrize("kind", ["session", "changed key"])
def test_a_run_on_spark_that_is_killed_at_every_write_folds_what_the_filter_alone_passes_on(
    world: World, kind: str, urls: dict[str, str], jvm: Jvm
) -> None:
    killed(world, kind, urls, jvm)


def killed(world: World, kind: str, urls: dict[str, str], jvm: Jvm | None = None, *, every: int = 1) -> None:
    flow, accept = filtered(world.topic, kind), ONE_NODE if "cassandra" in urls["filter"] else []
    names = ["filter"] if urls["filter"] == urls["incident"] else ["filter", "incident"]
    faults = commit_faults(flow, names)
    if jvm:  # a run on Spark takes ten times as long: what writes nothing is killed without Spark only
        faults = [fault for fault in faults if fault.point.startswith(("persist", "manifest"))]
    if flow.repeats_batches:
        faults += [Fault(LEDGER, end) for end in (FaultOutcome.BEFORE, FaultOutcome.AFTER)]
    faults = faults[::every]
    runs: list[Run] = []
    try:
        for fault, sent in zip([*faults, None], batches(kind, len(faults) + 1), strict=True):
            world.send([*sent, Sent(b"{}", b"A", partition=1)])
            runs.append(
                Run(world, ("filtered", world.topic, kind), str(fault or ""), jvm=jvm, local=jvm is None, accept=accept)
            )
            assert runs[-1].wait() == (-signal.SIGKILL if fault else 0), (fault, runs[-1].errors)
    finally:
        for run in runs:
            run.end()
    alone = FilterStates(FILTERS[kind])
    readable = [one for one in world.records() if one.value != b"{}"]
    if kind == "session":  # its time is a column
        readable = [replace(one, value=decode(one.value).payload) for one in readable]
    wanted = Counter(one.key for one in readable if alone.passes(one))
    assert {key: state["messages"] for key, state in world.results(flow, "incident").items()} == wanted
    assert wanted.total() == 12 * (len(faults) + 1)
    assert {letter.offset for letter, _ in world.dead_letters()} == {
        one.offset for one in world.records() if one.value == b"{}"
    }

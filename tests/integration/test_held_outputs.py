"""Outputs that a rebuild holds in Redis and in Cassandra come back in order, and are removed."""

import uuid
from contextlib import closing

import pytest

from aggregations.engine.held import forget_held
from aggregations.per_message.publishing import OutputMessage
from aggregations.run.held_outputs import HELD_OUTPUTS, held_outputs, hold_outputs
from envelope import Node
from persistence.cassandra import apply_schema
from persistence.names import FlowRef
from persistence.registry import open_store

pytestmark = [pytest.mark.integration]


@pytest.fixture(params=["redis", "cassandra"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "redis":
        return str(request.getfixturevalue("redis_url"))
    keyspace = f"{request.getfixturevalue('cassandra_url')}/held_{uuid.uuid4().hex[:8]}?replication=1&buckets=8"
    apply_schema(keyspace)
    return keyspace


def test_outputs_are_read_in_the_order_of_attempts_and_removed(url: str) -> None:
    flow = FlowRef(f"held-{uuid.uuid4().hex}", 2)
    made = [OutputMessage("out", b"k%d" % (n % 7), b"v" * 3_000, own=Node("legs", 0, n, "")) for n in range(600)]
    with closing(open_store(url)) as store:
        epoch = store.acquire_epoch(flow)
        for attempt in (3, 1, 2, 2):
            part = made[(attempt - 1) * 200 : attempt * 200]
            hold_outputs(store, flow, part, epoch=epoch, batch=attempt, attempt=attempt)
        assert [(one.key, one.value) for one in held_outputs(store, flow)] == [(one.key, one.value) for one in made]
        assert len([*store.scan(flow.stage(HELD_OUTPUTS))]) == 9
        forget_held(store, flow.stage(HELD_OUTPUTS), epoch=epoch)
        assert [*held_outputs(store, flow)] == []
        store.drop(flow)
        assert store.installed_epoch(flow) == 0

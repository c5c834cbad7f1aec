"""The facts that a Redis server reports, and the resulting risks for the flows of a URL."""

from dataclasses import replace

import pytest

from persistence.redis.preflight import Facts, findings, is_durable
from persistence.redis.settings import read_place, read_settings

SAFE = Facts("redis 7.2.5", "master", aof=True, fsync="always", policy="noeviction")
LAZY = replace(SAFE, fsync="everysec")
MANAGED = replace(SAFE, fsync="")
REPLICATED = replace(SAFE, replicas=1)
HOST, CLUSTER = "redis://h", "redis+cluster://h"


def risks(facts: Facts, url: str) -> dict[str, bool]:
    return {one.risk: one.unsafe for one in findings(facts, read_place(url), read_settings(url))}


@pytest.mark.parametrize(
    ("facts", "url", "found"),
    [
        (SAFE, HOST, {}),
        (SAFE, CLUSTER, {}),
        (replace(SAFE, role="slave"), HOST, {"replica": True}),
        (replace(SAFE, policy="allkeys-lfu"), HOST, {"eviction": True}),
        (replace(SAFE, policy="volatile-lru"), HOST, {}),
        (replace(SAFE, aof=False), HOST, {"no-aof": True}),
        (LAZY, HOST, {"fsync": False}),
        (LAZY, CLUSTER, {"fsync": True}),
        (MANAGED, CLUSTER, {"fsync": True}),
        (LAZY, f"{CLUSTER}?waitaof=1", {}),
        (LAZY, f"{CLUSTER}?waitaof=0,1", {"fsync": True}),
        (replace(LAZY, server="valkey 8.1.1"), f"{CLUSTER}?waitaof=1", {"fsync": True}),
        (REPLICATED, HOST, {"unwaited-replicas": True}),
        (REPLICATED, f"{HOST}?waitaof=1", {"unwaited-replicas": True}),
        (REPLICATED, f"{HOST}?waitaof=0,1", {}),
        (REPLICATED, f"{HOST}?wait=1", {}),
    ],
)
def test_a_risk_is_named_where_acknowledged_states_may_be_lost(facts: Facts, url: str, found: dict[str, bool]) -> None:
    assert risks(facts, url) == found
    assert is_durable(facts, read_settings(url)) is not bool(found.keys() & {"no-aof", "fsync"})

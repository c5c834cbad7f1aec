"""States in Redis as others see them, and states that were tampered with."""

import json

import pytest

from persistence.errors import Corrupt, Terminal
from persistence.protocol import Manifest, Progress, Write
from persistence.redis import open_store
from tests.support.redis_server import state_name
from tests.support.stores import begun

pytestmark = pytest.mark.integration


def test_states_can_be_read_by_any_other_client(valkey, stage):
    store = open_store(valkey.url)
    epoch = store.acquire_epoch(stage.flow_ref)
    store.save(stage, [Write(b"N14228", 0, b'{"legs":7}')], epoch=epoch, batch=3)
    store.save_manifest(stage.flow_ref, Manifest(epoch=epoch, batch=3, positions={"legs": {0: Progress(12)}}))
    client = valkey.client
    name = state_name(stage, b"N14228")
    assert client.get(name) == b'{"legs":7}'
    assert client.hgetall(name.removesuffix(b":N14228")) == {b"N14228": b"1 %d 3" % epoch}
    flow = client.hgetall(f"hw:{{{stage.flow}:1}}")
    assert flow.keys() == {b"epoch", b"buckets", b"manifest", b"manifest_head"}
    assert json.loads(flow[b"manifest"])["positions"] == {"legs": {"0": {"next_offset": 12}}}
    store.close()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda client, name, heads: client.delete(name), "disappeared: evicted, expired, deleted"),
        (lambda client, name, heads: (client.delete(name), client.rpush(name, "x")), "another type"),
        (lambda client, name, heads: client.hdel(heads, "k"), "head is missing"),
        (lambda client, name, heads: client.hset(heads, "k", "x"), "head is missing or cannot be read"),
        (lambda client, name, heads: client.hset(heads, "k", "7 3"), "head is missing or cannot be read"),
    ],
    ids=["deleted", "type", "headless", "head", "short"],
)
def test_a_state_that_was_tampered_with_is_corrupt_and_never_empty(valkey, stage, damage, says):
    store = open_store(valkey.url)
    begun(store, stage, [b"a", b"k", b"z"])
    name = state_name(stage)
    damage(valkey.client, name, name.removesuffix(b":k"))
    with pytest.raises(Corrupt, match=f"stage aircraft, key b'k'.*{says}"):
        store.load(stage, [b"a", b"k", b"z"])
    assert store.load(stage, [b"a", b"z"]).keys() == {b"a", b"z"}
    store.close()


def test_a_state_with_a_damaged_head_is_not_replaced(valkey, stage):
    store = open_store(valkey.url)
    epoch = begun(store, stage, [b"a", b"k", b"z"])
    valkey.client.hset(state_name(stage).removesuffix(b":k"), "k", "x")
    with pytest.raises(Corrupt, match=r"stage aircraft, key b'k'.*head"):
        store.save(stage, [Write(key, 1, b"second") for key in (b"a", b"k", b"z")], epoch=epoch, batch=1)
    assert store.load(stage, [b"a"])[b"a"].version == 1
    store.close()


def test_heads_of_another_type_are_corrupt(valkey, stage):
    store = open_store(valkey.url)
    epoch = begun(store, stage)
    heads = state_name(stage).removesuffix(b":k")
    valkey.client.delete(heads)
    valkey.client.set(heads, "x")
    with pytest.raises(Corrupt, match=r"stage aircraft.*another type"):
        store.load(stage, [b"k"])
    with pytest.raises(Corrupt, match=r"stage aircraft.*another type"):
        store.save(stage, [Write(b"k", 1, b"second")], epoch=epoch, batch=1)
    assert valkey.client.get(state_name(stage)) == b"first"
    store.close()


def test_a_damaged_manifest_is_corrupt(valkey, direct, stage):
    flow = stage.flow_ref
    epoch = direct.acquire_epoch(flow)
    direct.save_manifest(flow, Manifest(epoch=epoch, batch=1))
    valkey.client.hset(f"hw:{{{stage.flow}:1}}", "manifest", b'{"epoch":1')
    with pytest.raises(Corrupt, match="the manifest cannot be read"):
        direct.load_manifest(flow)


def test_the_number_of_buckets_is_a_fact_of_the_flow(valkey, stage):
    first = open_store(f"{valkey.url}?buckets=3")
    keys = [b"%d" % i for i in range(20)]
    begun(first, stage, keys)
    default, other = open_store(valkey.url), open_store(f"{valkey.url}?buckets=5")
    assert default.load(stage, keys).keys() == set(keys)
    assert default.acquire_epoch(stage.flow_ref) == 2
    with pytest.raises(Terminal, match="has 3 buckets"):
        other.acquire_epoch(stage.flow_ref)
    for store in (first, default, other):
        store.close()


def test_prefixes_keep_stores_in_one_server_apart(valkey, stage):
    one, two = open_store(f"{valkey.url}?prefix=one"), open_store(f"{valkey.url}?prefix=two")
    begun(one, stage)
    assert two.installed_epoch(stage.flow_ref) == 0
    assert two.load(stage, [b"k"]) == {}
    one.close()
    two.close()

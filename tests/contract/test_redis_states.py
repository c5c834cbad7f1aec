"""States in Redis as others see them, and states that were tampered with."""

import json

import pytest

from persistence.errors import Conflict, Corrupt, Terminal
from persistence.protocol import Manifest, Progress, Write
from persistence.redis import open_store
from tests.support.redis_server import states_name
from tests.support.stores import begun

pytestmark = pytest.mark.integration


def test_states_can_be_read_by_any_other_client(valkey, stage):
    store = open_store(f"{valkey.url}?buckets=1")
    epoch = store.acquire_epoch(stage.flow_ref)
    store.save(stage, [Write(b"N14228", 0, b'{"legs":7}')], epoch=epoch, batch=3)
    store.save_manifest(stage.flow_ref, Manifest(epoch=epoch, batch=3, positions={"legs": {0: Progress(12)}}))
    client = valkey.client
    assert client.hgetall(states_name(stage)) == {b"N14228": b'1 %d 3 {"legs":7}' % epoch}
    bucket = client.hgetall(f"hw:{{{stage.flow}:1:0}}")
    assert bucket.keys() == {b"epoch", b"buckets", b"mark:aircraft", b"states:aircraft", b"save:aircraft"}
    assert bucket[b"states:aircraft"] == b"1"
    flow = client.hgetall(f"hw:{{{stage.flow}:1}}")
    assert flow.keys() == {b"epoch", b"buckets", b"manifest", b"manifest_head"}
    assert json.loads(flow[b"manifest"])["positions"] == {"legs": {"0": {"next_offset": 12}}}
    store.close()


@pytest.mark.parametrize("content", [b"x", b"7 3", b"7 3 x {}", b"7 3 12"], ids=["text", "short", "word", "bare"])
def test_a_state_with_a_damaged_head_is_corrupt_and_is_not_replaced(valkey, stage, content):
    store = open_store(f"{valkey.url}?buckets=1")
    epoch = begun(store, stage, [b"a", b"k", b"z"])
    valkey.client.hset(states_name(stage), "k", content)
    with pytest.raises(Corrupt, match=r"stage aircraft, key b'k'.*head is missing or cannot be read"):
        store.load(stage, [b"a", b"k", b"z"])
    assert store.load(stage, [b"a", b"z"]).keys() == {b"a", b"z"}
    with pytest.raises(Corrupt, match=r"stage aircraft, key b'k'.*head"):
        store.save(stage, [Write(key, 1, b"second") for key in (b"a", b"k", b"z")], epoch=epoch, batch=1)
    assert store.load(stage, [b"a"])[b"a"].version == 1
    store.close()


@pytest.mark.parametrize(
    ("remove", "found"),
    [
        (lambda client, name: client.hdel(name, "k"), 2),
        (lambda client, name: client.delete(name), 0),
        (lambda client, name: client.hset(name, "other", "7 3 12 {}"), 4),
    ],
    ids=["one", "all", "foreign"],
)
def test_states_that_disappeared_are_noticed_by_what_misses_them_and_by_every_save(valkey, stage, remove, found):
    store = open_store(f"{valkey.url}?buckets=1")
    epoch = begun(store, stage, [b"a", b"k", b"z"])
    remove(valkey.client, states_name(stage))
    before = valkey.client.hgetall(states_name(stage))
    says = f"stage aircraft.*has {found} states; the last save left 3"
    with pytest.raises(Corrupt, match=says):
        store.load(stage, [b"a", b"new"])
    with pytest.raises(Corrupt, match=says):
        list(store.scan(stage))
    for write in (Write(b"k", 0, b"second"), Write(b"a", 1, b"second"), Write(b"new", 0, b"first")):
        with pytest.raises(Corrupt, match=says):
            store.save(stage, [write], epoch=epoch, batch=1)
    assert valkey.client.hgetall(states_name(stage)) == before
    store.close()


def test_a_state_that_another_writer_replaced_between_load_and_save_is_noticed_among_thousands(valkey, stage):
    """Of many states with different versions, in several scripts, exactly the replaced one conflicts."""
    store, other = open_store(f"{valkey.url}?buckets=1"), open_store(f"{valkey.url}?buckets=1")
    keys = [b"%d" % i for i in range(6000)]
    epoch = begun(store, stage, keys)
    store.save(stage, [Write(key, 1, b"second") for key in keys[::3]], epoch=epoch, batch=1)
    held = store.load(stage, keys)
    other.save(stage, [Write(b"4711", held[b"4711"].version, b"other's")], epoch=epoch, batch=2)
    writes = [Write(key, held[key].version, b"mine") for key in keys] + [Write(b"new", 0, b"mine")]
    with pytest.raises(Conflict) as conflict:
        store.save(stage, writes, epoch=epoch, batch=3)
    assert conflict.value.keys == (b"4711",)
    assert store.load(stage, [b"4711"])[b"4711"].value == b"other's"
    # What did not conflict may be written or not; each state is whole, and the rest can be saved again.
    for key, state in store.load(stage, keys).items():
        assert (state.version - held[key].version, state.batch) in {(0, held[key].batch), (1, 3), (1, 2)}
    again = [write for write in writes if write.key != b"4711"]
    store.save(stage, again, epoch=epoch, batch=3)
    assert {state.value for key, state in store.load(stage, keys).items() if key != b"4711"} == {b"mine"}
    assert int(valkey.client.hget(f"hw:{{{stage.flow}:1:0}}", "states:aircraft")) == 6001
    store.close()
    other.close()


def test_values_may_contain_what_separates_the_head(valkey, stage):
    store = open_store(valkey.url)
    epoch = store.acquire_epoch(stage.flow_ref)
    values = {b"": b"", b" ": b" ", b"1 2 3 ": b"1 2 3 4 5", b"\n": b"\x00 \n 7 "}
    store.save(stage, [Write(key, 0, value) for key, value in values.items()], epoch=epoch, batch=1)
    assert {key: state.value for key, state in store.load(stage, list(values)).items()} == values
    assert {key: state.value for key, state in store.scan(stage)} == values
    store.close()


def test_states_of_another_type_are_corrupt(valkey, stage):
    store = open_store(f"{valkey.url}?buckets=1")
    epoch = begun(store, stage)
    valkey.client.delete(states_name(stage))
    valkey.client.set(states_name(stage), "x")
    with pytest.raises(Corrupt, match=r"stage aircraft.*another type"):
        store.load(stage, [b"k"])
    with pytest.raises(Corrupt, match=r"stage aircraft.*another type"):
        store.save(stage, [Write(b"k", 1, b"second")], epoch=epoch, batch=1)
    assert valkey.client.get(states_name(stage)) == b"x"
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

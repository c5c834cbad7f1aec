"""States that a store holds are what the server stores, whoever else writes, and whatever the server loses."""

import random
from contextlib import closing

import pytest

from persistence.errors import Conflict, Transient
from persistence.protocol import Stored, Write
from persistence.redis import open_store, saving
from persistence.redis.held import ABSENT, HeldStates
from persistence.redis.layout import RedisLayout, by_bucket
from tests.support.proxy import Fault

pytestmark = pytest.mark.integration

KEYS = [b"%d" % i for i in range(14)]
LAYOUT = RedisLayout()


def calls(valkey, command):
    """How often a command was executed, by scripts, too, since the last `config_resetstat`."""
    return valkey.client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]


class Truth:
    """What the server stores, read without headwater."""

    def __init__(self, client, stage, buckets):
        self.client, self.stage = client, stage
        self.names = [LAYOUT.states(stage, bucket) for bucket in range(buckets)]
        self.hashes = [LAYOUT.bucket(stage.flow_ref, bucket) for bucket in range(buckets)]

    def states(self):
        found = {}
        for name in self.names:
            for key, content in self.client.hgetall(name).items():
                version, _, _, value = content.split(b" ", 3)
                found[key] = int(version), value
        return found

    def copy(self):
        """The content of all buckets, to go back to."""
        return {name: self.client.dump(name) for name in (*self.names, *self.hashes)}

    def go_back(self, copy):
        with self.client.pipeline() as pipeline:  # as a whole, as a failover does
            for name, content in copy.items():
                if content is None:
                    pipeline.delete(name)
                else:
                    pipeline.restore(name, 0, content, replace=True)
            pipeline.execute()


@pytest.mark.parametrize("seed", range(12))
def test_loads_return_and_saves_replace_what_is_stored_whatever_happens_in_between(valkey, stage, monkeypatch, seed):
    """Three writers, one of which holds nothing, a save in several scripts, lost answers, and buckets that go back."""
    chance = random.Random(seed)
    buckets = chance.choice([1, 2])
    monkeypatch.setattr(saving, "KEYS", 3)
    options = f"?buckets={buckets}&retry_for=1"
    stores = [open_store(f"{valkey.url}{options}&cache={cache}") for cache in (256, 256, 0)]
    epoch = stores[0].acquire_epoch(stage.flow_ref)
    truth = Truth(valkey.client, stage, buckets)
    copies, loaded = [truth.copy()], [{} for _ in stores]
    conflicts = skipped = 0
    for step in range(300):
        who = chance.randrange(3)
        store, mine = stores[who], loaded[who]
        keys = chance.sample(KEYS, chance.randrange(1, len(KEYS)))
        action = chance.choices(["load", "save", "save known", "copy", "go back"], [6, 4, 6, 1, 1])[0]
        if action == "copy":
            copies.append(truth.copy())
        elif action == "go back":
            truth.go_back(chance.choice(copies))
        elif action == "load":
            before = truth.states()
            found = store.load(stage, keys)
            assert {key: (one.version, one.value) for key, one in found.items()} == {
                key: before[key] for key in keys if key in before
            }
            mine |= dict.fromkeys(keys, 0) | {key: one.version for key, one in found.items()}
        else:
            before = truth.states()
            if action == "save known":  # as a task does: it has just loaded what it replaces
                mine |= dict.fromkeys(keys, 0) | {key: one.version for key, one in store.load(stage, keys).items()}
            writes = [Write(key, mine.get(key, 0), b"%d %d" % (step, chance.randrange(9))) for key in keys]
            changed = {one.key for one in writes if one.expected != before.get(one.key, (0, b""))[0]}
            valkey.client.config_resetstat()
            try:
                store.save(stage, writes, epoch=epoch, batch=step)
                assert not changed
            except Conflict as conflict:
                conflicts += 1
                assert set(conflict.keys) == changed
            skipped += 2 * calls(valkey, "evalsha") - calls(valkey, "hmget")
            after = truth.states()
            for one in writes:
                old, new = before.get(one.key), (one.expected + 1, one.value)
                assert after.get(one.key) == new or (changed and after.get(one.key) == old)
                if one.key in changed:
                    assert after.get(one.key) == old
                elif after.get(one.key) == new:
                    mine[one.key] = one.expected + 1
    assert conflicts
    assert skipped > 50  # scripts that did not compare versions
    for store in stores:
        store.close()


def test_a_second_batch_of_the_same_keys_reads_no_state(valkey, stage):
    keys = [b"%d" % i for i in range(6000)]
    with closing(open_store(valkey.url)) as store:
        epoch = store.acquire_epoch(stage.flow_ref)
        counted = []
        for batch in range(3):
            loaded = store.load(stage, keys)
            assert len(loaded) == (len(keys) if batch else 0)
            writes = [Write(key, batch, b"%d" % batch) for key in keys]
            valkey.client.config_resetstat()
            store.save(stage, writes, epoch=epoch, batch=batch)
            scripts = calls(valkey, "evalsha")
            assert calls(valkey, "hmget") == scripts  # of the bucket's own hash, and none of the states
            valkey.client.config_resetstat()
            assert {state.version for state in store.load(stage, keys).values()} == {batch + 1}
            counted.append(calls(valkey, "hmget"))
        assert counted == [4, 4, 4]  # the points of the four buckets


def test_nothing_is_held_without_memory_for_it_beyond_a_load_and_its_save(valkey, stage):
    keys = [b"%d" % i for i in range(100)]
    with closing(open_store(f"{valkey.url}?cache=0&buckets=1")) as store:
        epoch = store.acquire_epoch(stage.flow_ref)
        for batch in range(2):
            valkey.client.config_resetstat()
            store.load(stage, keys)
            assert calls(valkey, "hmget") == 2
            store.save(stage, [Write(key, batch, b"x") for key in keys], epoch=epoch, batch=batch)
            assert calls(valkey, "hmget") == 3


def test_states_that_were_not_used_for_the_longest_time_are_forgotten_first(stage):
    held, point = HeldStates(100_000), b"1 a+"
    first, second = ([b"%c%d" % (name, i) for i in range(250)] for name in b"ab")
    assert held.at(stage, 0, point, first) == [None] * 250
    held.read(stage, 0, point, first, [ABSENT] * 250)  # about 58,000 bytes
    held.make_room()
    assert held.at(stage, 0, point, first[:20]) == [ABSENT] * 20
    held.read(stage, 0, point, second, [ABSENT] * 250)
    held.make_room()
    assert held.at(stage, 0, point, [*first, *second]) == [ABSENT] * 20 + [None] * 230 + [ABSENT] * 250


def test_a_bucket_at_another_point_is_forgotten(stage):
    held = HeldStates(10**6)
    held.at(stage, 0, b"1 a+", [])
    held.read(stage, 0, b"1 a+", [b"k"], [ABSENT])
    held.read(stage, 0, b"2 b+", [b"l"], [ABSENT])  # not known at this point: not noted
    assert held.at(stage, 0, b"1 a+", [b"k", b"l"]) == [ABSENT, None]
    assert held.expects(stage, 0, b"1 a+", [Write(b"k", 0, b"")])
    assert not held.expects(stage, 0, b"1 a+", [Write(b"k", 1, b"")])
    assert not held.expects(stage, 0, b"1 a+", [Write(b"l", 0, b"")])
    assert not held.expects(stage, 0, b"2 b+", [Write(b"k", 0, b"")])
    held.written(stage, 0, b"1 a+", b"2 b+", [[Write(b"k", 0, b"x")]], 3, 4)
    assert held.at(stage, 0, b"2 b+", [b"k"]) == [Stored(1, 3, 4, b"x")]
    held.written(stage, 0, b"1 a+", b"3 c+", [[Write(b"k", 0, b"y")]], 3, 4)  # another thread has read since then
    assert held.point(stage, 0) == b"2 b+"
    assert held.at(stage, 0, b"1 a+", [b"k"]) == [None]
    assert held.at(stage, 0, b"2 b+", [b"k"]) == [None]


def test_a_save_whose_outcome_is_unknown_is_forgotten(valkey, proxy, url, stage):
    with closing(open_store(f"{url}&timeout=0.3&retry_for=1")) as store, closing(open_store(valkey.url)) as direct:
        epoch = store.acquire_epoch(stage.flow_ref)
        store.load(stage, KEYS)
        store.save(stage, [Write(key, 0, b"first") for key in KEYS], epoch=epoch, batch=1)
        for _ in range(100):
            proxy.arm(b"second", Fault.HOLD_AFTER)
        with pytest.raises(Transient):
            store.save(stage, [Write(key, 1, b"second") for key in KEYS], epoch=epoch, batch=2)
        assert {one.value for one in direct.load(stage, KEYS).values()} == {b"second"}
        assert store.load(stage, KEYS) == direct.load(stage, KEYS)
        proxy.release()


def test_every_key_is_in_one_bucket():
    divided = by_bucket(KEYS, KEYS, 4)
    assert sorted(key for some in divided.values() for key in some) == sorted(KEYS)
    assert by_bucket(KEYS, KEYS, 1) == {0: KEYS}

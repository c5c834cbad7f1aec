"""Saves by transactions: they write exactly what the script would write, whoever else writes and whatever is lost."""

import random
from contextlib import closing

import pytest

from persistence.errors import Conflict, Fenced, StoreWentBack, Terminal
from persistence.marks import Mark
from persistence.protocol import Write
from persistence.redis import open_store
from persistence.redis import store as redis_store
from persistence.redis.layout import RedisLayout
from persistence.redis.transaction import Transaction
from persistence.redis.versions import LoadedVersions
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


@pytest.mark.parametrize("seed", range(8))
def test_saves_replace_what_is_stored_whatever_happens_in_between(valkey, stage, monkeypatch, seed):
    """Three writers, a save in several transactions, and buckets that go back."""
    chance = random.Random(seed)
    buckets = chance.choice([1, 2])
    monkeypatch.setattr(redis_store, "_KEYS", 3)
    stores = [open_store(f"{valkey.url}?buckets={buckets}&retry_for=1") for _ in range(3)]
    epoch = stores[0].acquire_epoch(stage.flow_ref)
    truth = Truth(valkey.client, stage, buckets)
    copies, loaded = [truth.copy()], [{} for _ in stores]
    conflicts = transactions = scripts = 0
    for step in range(250):
        who = chance.randrange(3)
        store, mine = stores[who], loaded[who]
        keys = chance.sample(KEYS, chance.randrange(1, len(KEYS)))
        action = chance.choices(["load", "save", "load and save", "copy", "go back"], [6, 4, 6, 1, 1])[0]
        if action == "copy":
            copies.append(truth.copy())
            continue
        if action == "go back":
            truth.go_back(chance.choice(copies))
            continue
        before = truth.states()
        if action != "save":
            found = store.load(stage, keys)
            assert {key: (one.version, one.value) for key, one in found.items()} == {
                key: before[key] for key in keys if key in before
            }
            mine |= dict.fromkeys(keys, 0) | {key: one.version for key, one in found.items()}
        if action == "load":
            continue
        writes = [Write(key, mine.get(key, 0), b"%d %d" % (step, chance.randrange(9))) for key in keys]
        changed = {one.key for one in writes if one.expected != before.get(one.key, (0, b""))[0]}
        valkey.client.config_resetstat()
        try:
            store.save(stage, writes, epoch=epoch, batch=step)
            assert not changed
        except Conflict as conflict:
            conflicts += 1
            assert set(conflict.keys) == changed
        transactions, scripts = transactions + calls(valkey, "exec"), scripts + calls(valkey, "evalsha")
        after = truth.states()
        for one in writes:
            old, new = before.get(one.key), (one.expected + 1, one.value)
            assert after.get(one.key) == new or (changed and after.get(one.key) == old)
            if one.key in changed:
                assert after.get(one.key) == old
            elif after.get(one.key) == new:
                mine[one.key] = one.expected + 1
    assert min(conflicts, transactions, scripts) > 20, (conflicts, transactions, scripts)
    for store in stores:
        store.close()


def test_a_transaction_writes_the_same_hashes_as_the_script(valkey, stage, monkeypatch):
    """Mark, number of states, notes and states are those of the script, for new states and for replaced ones."""
    both = []
    for scripted in (True, False):
        valkey.client.flushdb()
        with closing(open_store(f"{valkey.url}?buckets=1")) as store:
            epoch = store.acquire_epoch(stage.flow_ref)
            for batch in range(3):
                keys = KEYS[batch : batch + 9]
                loaded = store.load(stage, keys)
                writes = [Write(key, loaded[key].version if key in loaded else 0, b"%d" % batch) for key in keys]
                if scripted:
                    monkeypatch.setattr(store, "_versions", LoadedVersions())
                valkey.client.config_resetstat()
                marks = store.save(
                    stage, writes, epoch=epoch, batch=batch, downstream={"later": {"0": f"{batch + 1} abc"}}
                )
                assert (calls(valkey, "evalsha"), calls(valkey, "exec")) == ((1, 0) if scripted else (0, 1))
            bucket = valkey.client.hgetall(LAYOUT.bucket(stage.flow_ref, 0))
            assert len(bucket.pop(b"save:aircraft")) == 12
            both.append((bucket, valkey.client.hgetall(LAYOUT.states(stage, 0)), marks))
    assert both[0] == both[1]
    assert both[0][2]["0"].count == 3


@pytest.mark.parametrize("buckets", [1, 4])
def test_batch_after_batch_of_one_writer_needs_no_script(valkey, stage, buckets):
    keys = [b"%d" % i for i in range(6000)]
    with closing(open_store(f"{valkey.url}?buckets={buckets}")) as store:
        epoch = store.acquire_epoch(stage.flow_ref)
        for batch in range(3):
            loaded = store.load(stage, keys)
            assert len(loaded) == (len(keys) if batch else 0)
            valkey.client.config_resetstat()
            store.save(stage, [Write(key, batch, b"%d" % batch) for key in keys], epoch=epoch, batch=batch)
            assert calls(valkey, "evalsha") == 0
            assert calls(valkey, "exec") == {1: 3, 4: 4}[buckets]


def test_a_run_that_was_frozen_before_its_transaction_is_fenced(valkey, stage, monkeypatch):
    """A newer run installs its epoch after the bucket was looked at."""
    with closing(open_store(valkey.url)) as store, closing(open_store(valkey.url)) as newer:
        epoch = store.acquire_epoch(stage.flow_ref)
        store.load(stage, [b"k"])
        write = Transaction.write

        def late(transaction, mark, there):
            newer.acquire_epoch(stage.flow_ref)
            return write(transaction, mark, there)

        monkeypatch.setattr(Transaction, "write", late)
        with pytest.raises(Fenced):
            store.save(stage, [Write(b"k", 0, b"old")], epoch=epoch, batch=1)
        assert newer.load(stage, [b"k"]) == {}


def test_a_state_that_changes_before_the_transaction_conflicts(valkey, stage, monkeypatch):
    with closing(open_store(valkey.url)) as store, closing(open_store(valkey.url)) as other:
        epoch = store.acquire_epoch(stage.flow_ref)
        store.load(stage, [b"k"])
        write = Transaction.write

        def late(transaction, mark, there):
            monkeypatch.setattr(Transaction, "write", write)
            other.save(stage, [Write(b"k", 0, b"theirs")], epoch=epoch, batch=1)
            return write(transaction, mark, there)

        monkeypatch.setattr(Transaction, "write", late)
        with pytest.raises(Conflict):
            store.save(stage, [Write(b"k", 0, b"mine")], epoch=epoch, batch=2)
        assert other.load(stage, [b"k"])[b"k"].value == b"theirs"


def test_a_bucket_that_does_not_hold_its_known_mark_gets_no_transaction(valkey, stage):
    """The script refuses it, and nothing is written."""
    with closing(open_store(f"{valkey.url}?buckets=1")) as store:
        epoch = store.acquire_epoch(stage.flow_ref)
        store.load(stage, [b"k"])
        with pytest.raises(StoreWentBack):
            store.save(stage, [Write(b"k", 0, b"x")], epoch=epoch, batch=1, known={"0": Mark(3, (("lost", 0),))})
        assert store.load(stage, [b"k"]) == {}


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
def test_a_transaction_whose_answer_is_lost_is_found_by_the_script(valkey, proxy, url, stage, fault):
    with closing(open_store(f"{url}&buckets=1")) as store, closing(open_store(valkey.url)) as direct:
        epoch = store.acquire_epoch(stage.flow_ref)
        store.load(stage, KEYS)
        met = proxy.arm(b"EXEC", fault)
        marks = store.save(stage, [Write(key, 0, b"first") for key in KEYS], epoch=epoch, batch=1)
        assert met.is_set()
        assert marks["0"].count == 1
        assert {(one.version, one.value) for one in direct.load(stage, KEYS).values()} == {(1, b"first")}
        assert direct.marks(stage)["0"].mark == marks["0"]


def test_too_few_replicas_are_an_error_although_the_transaction_is_written(valkey, stage):
    with closing(open_store(f"{valkey.url}?wait=1&wait_timeout=0.05&timeout=5&retry_for=1")) as store:
        with closing(open_store(valkey.url)) as other:
            epoch = other.acquire_epoch(stage.flow_ref)
        store.load(stage, [b"k"])
        with pytest.raises(Terminal, match="too few replicas"):
            store.save(stage, [Write(b"k", 0, b"x")], epoch=epoch, batch=1)

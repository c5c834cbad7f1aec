"""The shards of the LMDB store: which keys are in which, and epochs that count in all of them."""

import random
import shutil

import lmdb
import pytest

from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from persistence.errors import Fenced
from persistence.lmdb.shard import Shard
from persistence.murmur2 import murmur2, parts_of
from persistence.protocol import FlowRef, Write
from persistence.registry import open_store
from tests.support.letters import LEGS, Count, leg, runner

FLOW = FlowRef("fleet")
STAGE = FLOW.stage("aircraft")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "states"


@pytest.fixture
def store(path):
    store = open_store(f"lmdb://{path}")
    yield store
    store.close()


def install(path, epoch):
    """What another program does there."""
    with lmdb.open(str(path), create=False) as opened, opened.begin(write=True) as transaction:
        transaction.put(b"epoch/fleet/1", b"%d" % epoch)


@pytest.mark.parametrize(
    ("key", "hashed"),  # the values of Kafka's own test of its producer's hash
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_a_key_is_in_the_shard_of_its_hash_in_kafka(key, hashed):
    assert murmur2(key) == hashed % (1 << 32)
    assert parts_of([key], 4) == [hashed % 4]
    assert parts_of([key] * 100, 4) == [hashed % 4] * 100


def test_many_keys_are_divided_as_one_by_one():
    random.seed(7)
    keys = [random.randbytes(random.choice([0, 1, 2, 3, 4, 5, 8, 9, 40, 700])) for _ in range(2000)]
    assert parts_of(keys, 4) == [parts_of([key], 4)[0] for key in keys]


def test_an_epoch_is_installed_in_every_shard_and_is_above_that_of_each(store, path):
    store.acquire_epoch(FLOW)
    keys = [b"%04d" % i for i in range(100)]
    for shard in range(4):
        store.close()
        install(path / str(shard), 10 * (shard + 1))
        assert store.acquire_epoch(FLOW) == 10 * (shard + 1) + 1
    for shard in range(4):
        store.close()
        install(path / str(shard), 77)
        with pytest.raises(Fenced):
            store.install_epoch(FLOW, 60 + shard)
        with pytest.raises(Fenced):
            store.save(
                STAGE, [Write(key, 0, b"{}") for key in keys if parts_of([key], 4) == [shard]], epoch=60, batch=1
            )


def test_the_older_of_two_runs_that_begin_together_is_fenced_everywhere(store, path, monkeypatch):
    other = open_store(f"lmdb://{path}")
    known = Shard.install_epoch

    def meanwhile(self, flow, epoch, **options):
        monkeypatch.undo()
        assert other.acquire_epoch(FLOW) == 2
        known(self, flow, epoch, **options)

    monkeypatch.setattr(Shard, "install_epoch", meanwhile)
    assert store.acquire_epoch(FLOW) == 1
    for key in (b"%04d" % i for i in range(100)):
        with pytest.raises(Fenced):
            store.save(STAGE, [Write(key, 0, b"{}")], epoch=1, batch=1)


@pytest.mark.parametrize("lost", range(4))
def test_a_run_is_refused_if_a_shard_is_gone(path, lost):
    flow = Flow("fleet").source(LEGS).aggregate("totals", lambda element: str(element.root.offset), Count())
    url = f"lmdb://{path}"
    run = runner(flow, url)
    run.process([leg(n) for n in range(40)])
    run.run.close()
    shutil.rmtree(path / str(lost))
    risk = "store-empty" if lost == 0 else "store-went-back"
    with pytest.raises(RunRefusedError, match=risk):
        runner(flow, url)
    run = runner(flow, url, accept=[risk])
    run.process([leg(n) for n in range(40, 60)])
    run.run.close()
    runner(flow, url)

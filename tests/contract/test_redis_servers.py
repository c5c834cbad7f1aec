"""Redis servers in trouble: frozen, killed, full, emptied, without their scripts."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from persistence.errors import Terminal, Transient
from persistence.protocol import Stored, Write
from persistence.redis import open_store
from tests.support.redis_server import DURABLE, Answering, server, until
from tests.support.stores import begun

pytestmark = pytest.mark.integration


def test_a_frozen_server_takes_a_write_once_when_it_wakes(valkey, direct, stage):
    store = open_store(f"{valkey.url}?buckets=4&timeout=0.3")
    epoch = begun(store, stage)
    with ThreadPoolExecutor(1) as pool:
        valkey.signal(signal.SIGSTOP)
        try:
            writing = pool.submit(store.save, stage, [Write(b"k", 1, b"second")], epoch=epoch, batch=1)
            assert not writing.done()
            threading.Event().wait(1)  # three timeouts: the write waits in several connections
        finally:
            valkey.signal(signal.SIGCONT)
        writing.result(60)
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, epoch, 1, b"second")}
    store.close()


def test_a_killed_server_has_everything_that_it_acknowledged(stage):
    with server(*DURABLE) as valkey:
        store = open_store(f"{valkey.url}?retry_for=30")
        epoch = store.acquire_epoch(stage.flow_ref)
        keys = [b"%d" % i for i in range(300)]
        acknowledged = 0
        stop = threading.Event()

        def write():
            nonlocal acknowledged
            while not stop.is_set():
                writes = [Write(key, acknowledged, b"%d" % (acknowledged + 1)) for key in keys]
                store.save(stage, writes, epoch=epoch, batch=acknowledged)
                acknowledged += 1

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            for goal in (5, 10, 15):
                until(lambda goal=goal: acknowledged >= goal or writing.done())
                valkey.kill()
                valkey.start()
            stop.set()
            writing.result(60)
        held = store.load(stage, keys)
        assert {(state.version, state.value) for state in held.values()} == {(acknowledged, b"%d" % acknowledged)}
        store.close()


def test_a_scan_goes_on_over_a_restart_and_tells_every_state_once(stage):
    with server(*DURABLE) as valkey:
        store = open_store(f"{valkey.url}?retry_for=30")
        epoch = store.acquire_epoch(stage.flow_ref)
        keys = [b"%d" % i for i in range(10_000)]
        store.save(stage, [Write(key, 0, b"1") for key in keys], epoch=epoch, batch=0)
        told = store.scan(stage)
        found = [next(told)[0]]
        valkey.kill()
        valkey.start()
        found += [key for key, _ in told]
        assert sorted(found) == sorted(keys)
        store.close()


def test_scripts_that_a_server_forgot_are_sent_again(valkey, direct, stage):
    epoch = begun(direct, stage)
    for version in range(1, 4):
        valkey.client.script_flush()
        direct.save(
            stage, [Write(b"%d" % i, 0, b"") for i in range(version * 50, version * 50 + 50)], epoch=epoch, batch=1
        )
        valkey.client.script_flush()
        assert direct.load(stage, [b"k"]).keys() == {b"k"}
    assert len(list(direct.scan(stage))) == 151


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("LOADING Redis is loading the dataset in memory", Transient),
        ("READONLY You can't write against a read only replica.", Transient),
        ("OOM command not allowed when used memory > 'maxmemory'.", Terminal),
        ("MISCONF Errors writing to the AOF file", Terminal),
        ("MOVED 1 127.0.0.1:1", Transient),
        ("BUSY Redis is busy running a script.", Transient),
        ("NOREPLICAS Not enough good replicas to write.", Transient),
        ("NOSCRIPT No matching script.", Transient),
    ],
)
def test_a_server_in_trouble_is_tried_again_within_bounds_and_then_named(valkey, direct, stage, error, kind):
    epoch = begun(direct, stage)
    front = Answering(valkey, error, times=3)
    store = open_store(f"{front.url}?buckets=4")
    store.save(stage, [Write(b"k", 1, b"second")], epoch=epoch, batch=1)
    assert front.refused == 3
    front.close()
    for_ever = Answering(valkey, error, times=1_000_000)
    stuck = open_store(f"{for_ever.url}?buckets=4&retry_for=0.3")
    with pytest.raises(kind, match=f"aircraft.*{error.split()[0]}|aircraft.*cannot be reached"):
        stuck.save(stage, [Write(b"k", 2, b"third")], epoch=epoch, batch=2)
    for_ever.close()
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, epoch, 1, b"second")}
    store.close()
    stuck.close()


def test_a_full_server_is_terminal_and_nothing_of_a_script_is_written(stage):
    with server(*DURABLE, "--maxmemory-policy", "noeviction") as valkey:
        store = open_store(f"{valkey.url}?retry_for=0.3")
        epoch = begun(store, stage)
        valkey.client.config_set("maxmemory", 1)
        writes = [Write(b"k", 1, b"second"), *(Write(b"%d" % i, 0, bytes(1000)) for i in range(100))]
        with pytest.raises(Terminal, match="Raise maxmemory"):
            store.save(stage, writes, epoch=epoch, batch=1)
        valkey.client.config_set("maxmemory", 0)
        assert dict(store.scan(stage)) == {b"k": Stored(1, epoch, 0, b"first")}
        store.save(stage, writes, epoch=epoch, batch=1)
        assert len(list(store.scan(stage))) == 101
        store.close()


def test_a_server_that_was_emptied_under_a_running_flow_stops_it(stage):
    with server(*DURABLE) as valkey:
        store = open_store(valkey.url)
        epoch = begun(store, stage)
        valkey.client.flushall()
        with pytest.raises(Terminal, match="emptied or replaced"):
            store.save(stage, [Write(b"new", 0, b"")], epoch=epoch, batch=1)
        assert valkey.client.dbsize() == 0
        store.close()


def test_a_lost_hash_of_the_flow_does_not_give_an_epoch_again(valkey, direct, stage):
    begun(direct, stage)
    epoch = direct.acquire_epoch(stage.flow_ref)
    valkey.client.delete(f"hw:{{{stage.flow}:1}}")
    assert direct.acquire_epoch(stage.flow_ref) > epoch

"""Connections to Redis that break, hang or deliver late: a write takes effect once."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from persistence.contract.processes import increment_with
from persistence.errors import Conflict, Fenced, Transient
from persistence.protocol import Stored, Write
from persistence.redis import open_store
from persistence.redis.nodes import connect
from persistence.redis.settings import read_place, read_settings
from tests.support.proxy import BREAKING, Fault
from tests.support.stores import begun

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("fault", BREAKING)
def test_a_conflict_is_told_through_a_broken_connection(store, direct, proxy, stage, marker, fault):
    epoch = begun(store, stage, [b"%d" % i for i in range(40)])
    direct.save(stage, [Write(b"7", 1, b"theirs")], epoch=epoch, batch=1)
    proxy.arm(marker, fault)
    with pytest.raises(Conflict) as caught:
        store.save(stage, [Write(b"%d" % i, 1, marker) for i in range(40)], epoch=epoch, batch=2)
    assert caught.value.keys == (b"7",)
    assert direct.load(stage, [b"7"])[b"7"].value == b"theirs"


def test_an_answer_that_never_comes_is_asked_for_again_on_another_connection(url, direct, proxy, stage, marker):
    store = open_store(f"{url}&timeout=0.5")
    epoch = begun(store, stage)
    met = proxy.arm(marker, Fault.HOLD_AFTER)
    store.save(stage, [Write(b"k", 1, marker)], epoch=epoch, batch=1)
    assert met.is_set()
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, epoch, 1, marker)}
    store.close()


def test_a_write_that_arrives_late_after_it_was_repeated_changes_nothing(url, direct, proxy, stage, marker):
    store = open_store(f"{url}&timeout=0.5")
    epoch = begun(store, stage)
    proxy.arm(marker, Fault.HOLD_BEFORE)
    store.save(stage, [Write(b"k", 1, marker)], epoch=epoch, batch=1)
    direct.save(stage, [Write(b"k", 2, b"later")], epoch=epoch, batch=2)
    proxy.release()
    assert direct.load(stage, [b"k"]) == {b"k": Stored(3, epoch, 2, b"later")}
    store.close()


def test_a_connection_on_which_answers_may_still_come_is_not_used_again(valkey):
    nodes = connect(read_place(valkey.url), read_settings(valkey.url))
    (server,) = nodes.primaries()
    with pytest.raises(TypeError):
        server.exchange([("BLPOP", "nothing-comes", "1"), ("ECHO", object())])  # the second command cannot be sent
    assert server.exchange([("ECHO", "own")]) == [b"own"]
    nodes.close()


def test_the_client_never_repeats_a_write_by_itself(url, proxy, stage, marker):
    store = open_store(f"{url}&retry_for=1e-9")
    epoch = begun(store, stage)
    proxy.watch(marker)
    proxy.arm(marker, Fault.CUT_AFTER)
    with pytest.raises(Transient, match=r"aircraft.*cannot be reached"):
        store.save(stage, [Write(b"k", 1, marker)], epoch=epoch, batch=1)
    assert proxy.sent(marker) == 1
    store.close()


@pytest.mark.parametrize("fault", BREAKING)
@pytest.mark.parametrize("requests", range(2))
def test_an_epoch_is_acquired_through_a_broken_connection(store, direct, proxy, stage, fault, requests):
    epoch = begun(direct, stage)
    store.installed_epoch(stage.flow_ref)
    met = proxy.arm(b"EVALSHA", fault, skip=requests)
    acquired = store.acquire_epoch(stage.flow_ref)
    assert met.is_set()
    assert acquired > epoch
    assert direct.installed_epoch(stage.flow_ref) == acquired
    with pytest.raises(Fenced):
        direct.save(stage, [Write(b"k", 1, b"late")], epoch=epoch, batch=1)
    direct.save(stage, [Write(b"k", 1, b"new")], epoch=acquired, batch=0)


def test_a_server_that_stays_away_is_transient_with_a_remedy_and_no_secret(url, proxy, stage):
    store = open_store(f"{url}&retry_for=0.3".replace("redis://", "redis://:hunter2@"))
    with proxy.refusing(), pytest.raises(Transient, match=r"cannot be reached.*Check the server") as caught:
        store.load(stage, [b"k"])
    assert "hunter2" not in str(caught.value)
    store.close()


def test_counting_through_connections_that_break_at_random_is_exact(url, direct, proxy, stage):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    epoch = begun(direct, stage)
    store = open_store(url)
    ended = threading.Event()

    def vandal():
        met = None
        while not ended.wait(chance.uniform(0.01, 0.1)):
            if met is None or met.is_set():
                met = proxy.arm(stage.flow.encode(), chance.choice(BREAKING), skip=chance.randrange(6))
            elif chance.random() < 0.5:
                proxy.cut()

    with ThreadPoolExecutor(3) as pool:
        breaking = pool.submit(vandal)
        counting = [pool.submit(increment_with, store, stage, epoch, me, 150) for me in range(2)]
        try:
            for one in counting:
                one.result(300)
        finally:
            ended.set()
        breaking.result(10)
    held = direct.load(stage, [b"a", b"b", b"c"])
    assert {state.value for state in held.values()} == {b"150,150,0,0"}
    assert {state.version for state in held.values()} == {300}
    store.close()

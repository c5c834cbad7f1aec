"""Connections that break before and after the server applied a write, and runs that wake up too late."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from persistence.cassandra import open_store
from persistence.contract.processes import increment_with
from persistence.errors import Fenced, Transient
from persistence.protocol import Stored, Write
from tests.support.proxy import BREAKING, Fault
from tests.support.stores import begun


@pytest.fixture
def server_url(cassandra_store_url):
    return cassandra_store_url


def test_a_write_that_was_applied_is_read_back_and_not_sent_again(store, direct, proxy, stage, marker):
    epoch = begun(store, stage)
    proxy.watch(marker)
    proxy.arm(marker, Fault.CUT_AFTER)
    store.save(stage, [Write(b"k", 1, marker)], epoch=epoch, batch=1)
    assert proxy.sent(marker) == 1
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, epoch, 1, marker)}


def test_an_answer_that_never_comes_ends_in_a_read_on_another_connection(url, direct, proxy, stage, marker):
    store = open_store(f"{url}&timeout=0.5")
    epoch = begun(store, stage)
    proxy.watch(marker)
    met = proxy.arm(marker, Fault.HOLD_AFTER)
    store.save(stage, [Write(b"k", 1, marker)], epoch=epoch, batch=1)
    assert met.is_set()
    assert proxy.sent(marker) == 1
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, epoch, 1, marker)}
    store.close()


@pytest.mark.parametrize("fault", BREAKING)
@pytest.mark.parametrize("requests", range(8))
def test_an_epoch_is_acquired_through_a_broken_connection(store, direct, proxy, stage, fault, requests):
    # Each request of acquiring an epoch for a flow that has a stage names the flow; every one of them breaks once.
    epoch = begun(direct, stage)
    store.installed_epoch(stage.flow_ref)
    proxy.arm(stage.flow.encode(), fault, skip=requests)
    acquired = store.acquire_epoch(stage.flow_ref)
    assert acquired > epoch
    assert direct.installed_epoch(stage.flow_ref) == acquired
    with pytest.raises(Fenced):
        direct.save(stage, [Write(b"k", 1, b"late")], epoch=epoch, batch=1)
    direct.save(stage, [Write(b"k", 1, b"new")], epoch=acquired, batch=0)


@pytest.mark.parametrize("requests", range(3))
def test_a_stage_begins_through_a_broken_connection(store, direct, proxy, stage, requests):
    epoch = store.acquire_epoch(stage.flow_ref)
    proxy.arm(b"aircraft", Fault.CUT_AFTER, skip=requests)
    store.save(stage, [Write(b"k", 0, b"1")], epoch=epoch, batch=0)
    assert direct.load(stage, [b"k"]) == {b"k": Stored(1, epoch, 0, b"1")}


def test_a_server_that_stays_away_is_transient_with_a_remedy_and_no_secret(url, proxy, stage):
    store = open_store(f"{url}&retry_for=1&connect_timeout=1")
    patient = open_store(url)
    epoch = begun(store, stage)
    patient.load(stage, [b"k"])
    with proxy.refusing():
        with pytest.raises(Transient, match=r"aircraft.*Check that the cluster is running"):
            store.save(stage, [Write(b"k", 1, b"SECRET")], epoch=epoch, batch=1)
        with pytest.raises(Transient) as caught:
            store.load(stage, [b"k"])
        fresh = open_store(f"{url}&retry_for=1&connect_timeout=1")
        with pytest.raises(Transient, match="no host can be reached"):
            fresh.installed_epoch(stage.flow_ref)
        fresh.close()
    assert "SECRET" not in str(caught.value)
    # A handle that was open before works again when the server is back.
    assert patient.load(stage, [b"k"]) == {b"k": Stored(1, epoch, 0, b"first")}
    patient.close()
    store.close()


def test_closing_does_not_wait_for_a_server_that_is_silent(url, proxy, stage, marker):
    store = open_store(f"{url}&timeout=60")
    epoch = begun(store, stage)
    met = proxy.arm(marker, Fault.HOLD_AFTER)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(store.save, stage, [Write(b"k", 1, marker)], epoch=epoch, batch=1)
        assert met.wait(60)
        store.close()
        proxy.release()
        writing.result(60)
    store.close()  # the write has opened connections again, to read what became of it


def test_in_timestamp_mode_such_a_write_replaces_what_the_newer_run_has_not_written(
    url, direct, cassandra_url, keyspace, proxy, stage, marker
):
    """The documented hole of `mode=timestamp`, and its border: what the newer run has written stays."""
    store = open_store(f"{url}&mode=timestamp&timeout=60&retry_for=60&buckets=1")
    other = open_store(f"{cassandra_url}/{keyspace}?mode=timestamp")
    assert not store.capabilities.fenced
    epoch = begun(store, stage, [b"k", b"untouched"])
    held = proxy.arm(marker, Fault.HOLD_BEFORE)
    with ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(
            store.save, stage, [Write(key, 1, marker) for key in (b"k", b"untouched")], epoch=epoch, batch=1
        )
        assert held.wait(60)
        newer = other.acquire_epoch(stage.flow_ref)
        loaded = other.load(stage, [b"k", b"untouched"])
        assert loaded[b"untouched"].value == b"first"
        other.save(stage, [Write(b"k", 1, b"newer")], epoch=newer, batch=0)
        proxy.release()
        zombie.result(60)
    assert other.load(stage, [b"k", b"untouched"]) == {
        b"k": Stored(2, newer, 0, b"newer"),
        b"untouched": Stored(2, epoch, 1, marker),
    }
    # The next write of the zombie is refused: the hole is as wide as one request.
    with pytest.raises(Fenced):
        store.save(stage, [Write(b"untouched", 2, marker)], epoch=epoch, batch=2)
    store.close()
    other.close()


class Unlucky:
    """A store with a broken connection at about every third request."""

    def __init__(self, store, proxy, chance):
        self._store, self._proxy, self._chance = store, proxy, chance

    def load(self, stage, keys):
        return self._store.load(stage, keys)

    def save(self, stage, writes, **numbers):
        if self._chance.random() < 0.4:
            self._proxy.arm(stage.flow.encode(), self._chance.choice(BREAKING), skip=self._chance.randrange(6))
        self._store.save(stage, writes, **numbers)


@pytest.mark.slow
def test_counting_through_connections_that_break_at_random_is_exact(url, direct, proxy, stage):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    epoch = begun(direct, stage)
    stores = [open_store(url) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        counting = [
            pool.submit(increment_with, Unlucky(store, proxy, random.Random(seed + me)), stage, epoch, me, 20)
            for me, store in enumerate(stores)
        ]
        for one in counting:
            one.result(300)
    held = direct.load(stage, [b"a", b"b", b"c"])
    assert {state.value for state in held.values()} == {b"20,20,0,0"}
    assert {state.version for state in held.values()} == {40}
    for store in stores:
        store.close()

"""Connections to Redis and Cassandra that break or deliver late: a write takes effect once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from persistence.errors import Fenced
from persistence.protocol import Manifest, Progress, Stored, Write
from persistence.registry import open_store
from tests.support.proxy import BREAKING, Fault
from tests.support.stores import begun

pytestmark = pytest.mark.integration


@pytest.fixture(params=["redis", "cassandra"])
def server_url(request):
    return request.getfixturevalue(f"{request.param}_store_url")


@pytest.mark.parametrize("fault", BREAKING)
def test_a_write_whose_connection_breaks_takes_effect_once(store, direct, proxy, stage, marker, fault):
    epoch = begun(store, stage)
    met = proxy.arm(marker, fault)
    store.save(stage, [Write(b"k", 1, marker)], epoch=epoch, batch=1)
    assert met.is_set()
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, epoch, 1, marker)}


@pytest.mark.parametrize("fault", BREAKING)
def test_a_manifest_is_saved_once_through_a_broken_connection(store, direct, proxy, stage, marker, fault):
    flow = stage.flow_ref
    manifest = Manifest(epoch=store.acquire_epoch(flow), batch=3, positions={marker.decode(): {0: Progress(7)}})
    met = proxy.arm(marker, fault)
    store.save_manifest(flow, manifest)
    assert met.is_set()
    assert direct.load_manifest(flow) == manifest


def test_reads_go_on_over_broken_connections(store, direct, proxy, stage):
    keys = [b"%d" % i for i in range(100)]
    begun(direct, stage, keys)
    for _ in range(3):
        proxy.cut()
        assert store.load(stage, keys).keys() == set(keys)
        proxy.cut()
        assert {key for key, _ in store.scan(stage)} == set(keys)


def test_a_write_that_was_sent_before_a_newer_run_began_changes_nothing_when_it_arrives(
    url, direct, proxy, stage, marker
):
    """The zombie's request is on its way while the newer run installs its epoch, loads and writes."""
    store = open_store(f"{url}&timeout=60&retry_for=60")
    epoch = begun(store, stage, [b"k", b"untouched"])
    untouched = Stored(1, epoch, 0, b"first")
    held = proxy.arm(marker, Fault.HOLD_BEFORE)
    with ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(
            store.save, stage, [Write(key, 1, marker) for key in (b"k", b"untouched")], epoch=epoch, batch=1
        )
        assert held.wait(60)
        newer = direct.acquire_epoch(stage.flow_ref)
        assert direct.load(stage, [b"k", b"untouched"]) == dict.fromkeys((b"k", b"untouched"), untouched)
        direct.save(stage, [Write(b"k", 1, b"newer")], epoch=newer, batch=0)
        proxy.release()
        with pytest.raises(Fenced):
            zombie.result(60)
    assert direct.load(stage, [b"k", b"untouched"]) == {
        b"k": Stored(2, newer, 0, b"newer"),
        b"untouched": untouched,
    }
    store.close()

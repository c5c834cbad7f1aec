"""Redis that loses acknowledged writes: a failover to a lagging replica, a node with an older file."""

import shutil
import socket
import threading
from contextlib import closing, contextmanager, suppress

import pytest
from redis.crc import key_slot

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.run.memory import MemoryRunner
from persistence.errors import StoreWentBack, Terminal, Transient
from persistence.murmur2 import parts_of
from persistence.names import FlowRef
from persistence.protocol import Manifest, Write
from persistence.redis import open_store, preflight
from persistence.redis.layout import RedisLayout
from tests.support.pure import bare, leg
from tests.support.redis_server import DURABLE, cluster, server, until

pytestmark = pytest.mark.integration

COUNT = Fields(n=count())
FLOW = Flow("delay").source(bare()).aggregate("aircraft", "tail", COUNT).aggregate("carrier", "carrier", COUNT)


def legs(first, last):
    return [leg(offset, tail=f"N{offset % 9}", carrier="UA") for offset in range(first, last)]


class Address:
    """One address for servers that replace each other, as in a failover."""

    def __init__(self, to):
        self.to = to
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                try:
                    behind = socket.create_connection(("127.0.0.1", self.to.port))
                except OSError:
                    client.close()
                    continue
                for one, other in ((client, behind), (behind, client)):
                    threading.Thread(target=_pipe, args=(one, other), daemon=True).start()

    def close(self):
        self.listener.close()


def _pipe(one, other):
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def replicated():
    """An address, its primary, and the replica."""
    with (
        server(*DURABLE) as primary,
        server(*DURABLE, "--replicaof", "127.0.0.1", str(primary.port)) as replica,
        closing(Address(primary)) as address,
    ):
        until(lambda: replica.client.info("replication")["master_link_status"] == "up")
        yield address, primary, replica


def lag(primary, replica):
    """The replica has what there is, and gets nothing more."""
    primary.client.set("caught-up", "1")
    assert primary.client.wait(1, 5000) == 1
    replica.client.execute_command("REPLICAOF", "127.0.0.1", "1")


def fail_over(address, primary, replica):
    primary.kill()
    replica.client.execute_command("REPLICAOF", "NO", "ONE")
    address.to = replica


def test_replicas_that_nothing_waits_for_are_refused_by_name():
    with replicated() as (address, _, _):
        assert [(one.risk, one.unsafe) for one in preflight(address.url)] == [("unwaited-replicas", True)]
        with closing(open_store(address.url)) as store, pytest.raises(Terminal, match=r"Add \?wait=1"):
            store.acquire_epoch(FlowRef("refused"))
        for option in ("wait=1", "waitaof=1,1"):
            assert preflight(f"{address.url}?{option}") == []
        accepted = preflight(f"{address.url}?accept=unwaited-replicas")
        assert [(one.risk, one.unsafe) for one in accepted] == [("unwaited-replicas", False)]


def test_a_failover_that_lost_a_batch_ends_the_run_and_the_next_one_folds_it_again():
    with replicated() as (address, primary, replica):
        url = f"{address.url}?accept=unwaited-replicas"
        urls = {"aircraft": url, "carrier": url}
        run = MemoryRunner(FLOW, urls)
        run.process(legs(0, 30))
        lag(primary, replica)
        run.process(legs(30, 60))
        fail_over(address, primary, replica)
        with pytest.raises(StoreWentBack, match=r"went back.*Start the flow again"):
            run.process(legs(60, 90))
        run.close()
        again = MemoryRunner(FLOW, urls)
        assert again.run.start == {("legs", 0): 30}
        again.process(legs(30, 90))
        assert again.results("carrier") == {b"UA": {"n": 90}}
        assert sum(one["n"] for one in again.results("aircraft").values()) == 90
        again.close()


def test_a_failover_between_two_saves_of_one_batch_is_noticed_though_the_numbers_are_the_same():
    stage = FlowRef("covered").stage("s")
    with replicated() as (address, primary, replica):
        store = open_store(f"{address.url}?accept=unwaited-replicas&retry_for=30&buckets=1")
        epoch = store.acquire_epoch(stage.flow_ref)
        before = store.save(stage, [Write(b"a", 0, b"1")], epoch=epoch, batch=1)
        lag(primary, replica)
        lost = store.save(stage, [Write(b"a", 1, b"2")], epoch=epoch, batch=2, known=before)
        fail_over(address, primary, replica)
        covered = store.save(stage, [Write(b"b", 0, b"1")], epoch=epoch, batch=2, known=before)
        assert covered["0"].count == lost["0"].count
        assert not covered["0"].holds(lost["0"])
        assert covered["0"].holds(before["0"])
        with pytest.raises(StoreWentBack):
            store.save(stage, [Write(b"c", 0, b"1")], epoch=epoch, batch=3, known=lost)
        assert store.load(stage, [b"c"]) == {}
        store.close()


def test_a_clean_restart_of_a_durable_server_is_no_loss():
    with server(*DURABLE) as valkey:
        url = f"{valkey.url}?retry_for=30&buckets=4"
        urls = {"aircraft": url, "carrier": url}
        run = MemoryRunner(FLOW, urls)
        for batch in range(3):
            run.process(legs(30 * batch, 30 * batch + 30))
            valkey.client.shutdown() if batch == 0 else valkey.kill()
            valkey.process.wait()
            valkey.start()
        run.process(legs(90, 120))
        run.close()
        again = MemoryRunner(FLOW, urls)
        again.process(legs(120, 130))
        assert again.results("carrier") == {b"UA": {"n": 130}}
        again.close()


def test_a_failover_to_a_replica_that_has_everything_is_no_loss():
    with replicated() as (address, primary, replica):
        url = f"{address.url}?wait=1&wait_timeout=4&retry_for=30"
        urls = {"aircraft": url, "carrier": url}
        run = MemoryRunner(FLOW, urls)
        run.process(legs(0, 30))
        run.process(legs(30, 60))
        run.close()
        fail_over(address, primary, replica)
        alone = dict.fromkeys(urls, address.url)
        again = MemoryRunner(FLOW, alone)
        again.process(legs(60, 90))
        assert again.results("carrier") == {b"UA": {"n": 90}}
        again.close()


def test_a_manifest_that_went_back_alone_is_noticed_by_the_run_that_wrote_it(valkey):
    flow = FlowRef("manifest-went-back")
    with closing(open_store(f"{valkey.url}?buckets=4")) as store:
        epoch = store.acquire_epoch(flow)
        store.save_manifest(flow, Manifest(epoch, 1))
        older = valkey.client.dump(RedisLayout().flow(flow))
        store.save_manifest(flow, Manifest(epoch, 2), after=(epoch, 1))
        valkey.client.restore(RedisLayout().flow(flow), 0, older, replace=True)
        with pytest.raises(StoreWentBack, match="batch 2 was acknowledged; the store has epoch 1, batch 1"):
            store.save_manifest(flow, Manifest(epoch, 3), after=(epoch, 2))


@pytest.fixture
def lost_node():
    """A cluster in which one node, with the carrier's state but not the manifest, returns with an older file."""
    with cluster() as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}?retry_for=30"
        urls = {"aircraft": url, "carrier": url}
        run = MemoryRunner(FLOW, urls)
        run.process(legs(0, 90))
        layout, ref = RedisLayout(), FlowRef(FLOW.name)
        victim = _owner(nodes, layout.bucket(ref, parts_of([b"UA"], 64)[0]))
        assert victim is not _owner(nodes, layout.flow(ref))
        file, copy = victim.directory / "appendonlydir", victim.directory / "older"
        shutil.copytree(file, copy)
        run.process(legs(90, 180))
        assert run.results("carrier") == {b"UA": {"n": 180}}
        victim.kill()
        shutil.rmtree(file)
        shutil.copytree(copy, file)
        victim.start()
        for node in nodes:
            until(lambda node=node: node.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        yield run, urls
        run.close()


def test_a_node_that_comes_back_with_an_older_file_ends_the_run_and_the_next_start_is_refused(lost_node):
    run, urls = lost_node
    with pytest.raises(StoreWentBack, match=r"stage (carrier|aircraft).*went back"):
        run.process(legs(180, 270))
    with pytest.raises(RunRefusedError, match=r"lost acknowledged states.*stage carrier.*--accept store-went-back"):
        MemoryRunner(FLOW, urls)


def test_a_loss_that_was_accepted_is_not_held_against_the_runs_after_it(lost_node):
    _, urls = lost_node
    accepting = MemoryRunner(FLOW, urls, accept=["store-went-back"])
    assert accepting.run.start == {("legs", 0): 180}
    accepting.process(legs(180, 270))
    accepting.close()
    after = MemoryRunner(FLOW, urls)
    after.process(legs(270, 300))
    assert after.results("carrier") == {b"UA": {"n": 210}}
    after.close()


def test_a_cluster_that_acknowledges_before_the_disk_has_it_is_refused_by_name():
    with cluster() as nodes:
        for node in nodes:
            node.client.config_set("appendfsync", "everysec")
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}"
        assert {(one.risk, one.unsafe) for one in preflight(url)} == {("fsync", True)}
        with closing(open_store(url)) as store:
            assert not store.capabilities.durable
            with pytest.raises(Terminal, match=r"appendfsync everysec.*\?accept=fsync"):
                store.acquire_epoch(FlowRef("refused"))
    with server("--appendonly", "yes", "--appendfsync", "everysec", "--save", "") as alone:
        assert [(one.risk, one.unsafe) for one in preflight(alone.url)] == [("fsync", False)]


def _owner(nodes, key):
    slot = key_slot(key)
    for node in nodes:
        for low, high, primary, *_ in node.client.execute_command("CLUSTER SLOTS"):
            if low <= slot <= high and primary[1] == node.port:
                return node
    raise Transient("no node has the slot")

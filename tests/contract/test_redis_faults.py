"""Redis in trouble: connections that break, servers that freeze, fill up, fail over, forget or are tampered with."""

import json
import random
import signal
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from persistence.contract.processes import increment_with
from persistence.errors import Conflict, Corrupt, Fenced, Terminal, Transient
from persistence.protocol import FlowRef, Manifest, Progress, Stored, Write
from persistence.redis import open_store, preflight
from tests.support.proxy import Fault, Proxy
from tests.support.redis_server import DURABLE, Answering, encrypted, server, until

pytestmark = pytest.mark.integration

BREAKING = [Fault.CUT_BEFORE, Fault.CUT_AFTER, Fault.HALF_CLOSE]


@pytest.fixture(scope="module")
def valkey():
    with server(*DURABLE) as running:
        yield running


@pytest.fixture
def proxy(valkey):
    proxy = Proxy(("127.0.0.1", valkey.port))
    yield proxy
    proxy.close()


@pytest.fixture
def url(proxy):
    return f"redis://127.0.0.1:{proxy.port}?buckets=4"


@pytest.fixture
def store(url):
    store = open_store(url)
    yield store
    store.close()


@pytest.fixture
def direct(valkey):
    store = open_store(f"{valkey.url}?buckets=4")
    yield store
    store.close()


@pytest.fixture
def stage():
    return FlowRef(f"faults-{uuid.uuid4().hex}").stage("aircraft")


@pytest.fixture
def marker():
    """Bytes that only one write carries."""
    return uuid.uuid4().hex.encode()


def begun(store, stage, keys=(b"k",)):
    """The term of a run that has written every key once."""
    term = store.acquire_term(stage.flow_ref)
    store.save(stage, [Write(key, 0, b"first") for key in keys], term=term, batch=0)
    return term


def names(valkey, stage, key=b"k"):
    """Name of a state of a flow that has one bucket."""
    return b"hw:{%b:1:0}:%b:%b" % (stage.flow.encode(), stage.stage.encode(), key)


# Connections


@pytest.mark.parametrize("fault", BREAKING)
def test_a_write_whose_connection_breaks_takes_effect_once(store, direct, proxy, stage, marker, fault):
    term = begun(store, stage)
    met = proxy.arm(marker, fault)
    store.save(stage, [Write(b"k", 1, marker)], term=term, batch=1)
    assert met.is_set()
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, term, 1, marker)}


@pytest.mark.parametrize("fault", BREAKING)
def test_a_conflict_is_told_through_a_broken_connection(store, direct, proxy, stage, marker, fault):
    term = begun(store, stage, [b"%d" % i for i in range(40)])
    direct.save(stage, [Write(b"7", 1, b"theirs")], term=term, batch=1)
    proxy.arm(marker, fault)
    with pytest.raises(Conflict) as caught:
        store.save(stage, [Write(b"%d" % i, 1, marker) for i in range(40)], term=term, batch=2)
    assert caught.value.keys == (b"7",)
    assert direct.load(stage, [b"7"])[b"7"].value == b"theirs"


def test_an_answer_that_never_comes_is_asked_for_again_on_another_connection(url, direct, proxy, stage, marker):
    store = open_store(f"{url}&timeout=0.5")
    term = begun(store, stage)
    met = proxy.arm(marker, Fault.HOLD_AFTER)
    store.save(stage, [Write(b"k", 1, marker)], term=term, batch=1)
    assert met.is_set()
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, term, 1, marker)}
    store.close()


def test_a_write_that_arrives_late_after_it_was_repeated_changes_nothing(url, direct, proxy, stage, marker):
    store = open_store(f"{url}&timeout=0.5")
    term = begun(store, stage)
    proxy.arm(marker, Fault.HOLD_BEFORE)
    store.save(stage, [Write(b"k", 1, marker)], term=term, batch=1)
    direct.save(stage, [Write(b"k", 2, b"later")], term=term, batch=2)
    proxy.release()
    assert direct.load(stage, [b"k"]) == {b"k": Stored(3, term, 2, b"later")}
    store.close()


def test_the_client_never_repeats_a_write_by_itself(url, proxy, stage, marker):
    store = open_store(f"{url}&retry_for=1e-9")
    term = begun(store, stage)
    proxy.watch(marker)
    proxy.arm(marker, Fault.CUT_AFTER)
    with pytest.raises(Transient, match=r"aircraft.*cannot be reached"):
        store.save(stage, [Write(b"k", 1, marker)], term=term, batch=1)
    assert proxy.sent(marker) == 1
    store.close()


@pytest.mark.parametrize("fault", BREAKING)
@pytest.mark.parametrize("requests", range(2))
def test_a_term_is_acquired_through_a_broken_connection(store, direct, proxy, stage, fault, requests):
    term = begun(direct, stage)
    store.installed_term(stage.flow_ref)
    met = proxy.arm(b"EVALSHA", fault, skip=requests)
    acquired = store.acquire_term(stage.flow_ref)
    assert met.is_set()
    assert acquired > term
    assert direct.installed_term(stage.flow_ref) == acquired
    with pytest.raises(Fenced):
        direct.save(stage, [Write(b"k", 1, b"late")], term=term, batch=1)
    direct.save(stage, [Write(b"k", 1, b"new")], term=acquired, batch=0)


@pytest.mark.parametrize("fault", BREAKING)
def test_a_manifest_is_saved_once_through_a_broken_connection(store, direct, proxy, stage, marker, fault):
    flow = stage.flow_ref
    manifest = Manifest(term=store.acquire_term(flow), batch=3, positions={marker.decode(): {0: Progress(7)}})
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


def test_a_server_that_stays_away_is_transient_with_a_remedy_and_no_secret(url, proxy, stage):
    store = open_store(f"{url}&retry_for=0.3".replace("redis://", "redis://:hunter2@"))
    with proxy.refusing(), pytest.raises(Transient, match=r"cannot be reached.*Check that it runs") as caught:
        store.load(stage, [b"k"])
    assert "hunter2" not in str(caught.value)
    store.close()


def test_a_write_that_was_sent_before_a_newer_run_began_changes_nothing_when_it_arrives(
    url, direct, proxy, stage, marker
):
    store = open_store(f"{url}&timeout=60")
    term = begun(store, stage, [b"k", b"untouched"])
    held = proxy.arm(marker, Fault.HOLD_BEFORE)
    with ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(
            store.save, stage, [Write(key, 1, marker) for key in (b"k", b"untouched")], term=term, batch=1
        )
        assert held.wait(60)
        newer = direct.acquire_term(stage.flow_ref)
        direct.save(stage, [Write(b"k", 1, b"newer")], term=newer, batch=0)
        proxy.release()
        with pytest.raises(Fenced):
            zombie.result(60)
    assert direct.load(stage, [b"k", b"untouched"]) == {
        b"k": Stored(2, newer, 0, b"newer"),
        b"untouched": Stored(1, term, 0, b"first"),
    }
    store.close()


def test_counting_through_connections_that_break_at_random_is_exact(url, direct, proxy, stage):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    term = begun(direct, stage)
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
        counting = [pool.submit(increment_with, store, stage, term, me, 150) for me in range(2)]
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


# Servers


def test_a_frozen_server_takes_a_write_once_when_it_wakes(valkey, direct, stage):
    store = open_store(f"{valkey.url}?buckets=4&timeout=0.3")
    term = begun(store, stage)
    with ThreadPoolExecutor(1) as pool:
        valkey.signal(signal.SIGSTOP)
        try:
            writing = pool.submit(store.save, stage, [Write(b"k", 1, b"second")], term=term, batch=1)
            assert not writing.done()
            threading.Event().wait(1)  # three timeouts: the write waits in several connections
        finally:
            valkey.signal(signal.SIGCONT)
        writing.result(60)
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, term, 1, b"second")}
    store.close()


def test_a_killed_server_has_everything_that_it_acknowledged(stage):
    with server(*DURABLE) as valkey:
        store = open_store(f"{valkey.url}?retry_for=30")
        term = store.acquire_term(stage.flow_ref)
        keys = [b"%d" % i for i in range(300)]
        acknowledged = 0
        stop = threading.Event()

        def write():
            nonlocal acknowledged
            while not stop.is_set():
                writes = [Write(key, acknowledged, b"%d" % (acknowledged + 1)) for key in keys]
                store.save(stage, writes, term=term, batch=acknowledged)
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


def test_scripts_that_a_server_forgot_are_sent_again(valkey, direct, stage):
    term = begun(direct, stage)
    for version in range(1, 4):
        valkey.client.script_flush()
        direct.save(
            stage, [Write(b"%d" % i, 0, b"") for i in range(version * 50, version * 50 + 50)], term=term, batch=1
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
    term = begun(direct, stage)
    front = Answering(valkey, error, times=3)
    store = open_store(f"{front.url}?buckets=4")
    store.save(stage, [Write(b"k", 1, b"second")], term=term, batch=1)
    assert front.refused == 3
    front.close()
    for_ever = Answering(valkey, error, times=1_000_000)
    stuck = open_store(f"{for_ever.url}?buckets=4&retry_for=0.3")
    with pytest.raises(kind, match=f"aircraft.*{error.split()[0]}|aircraft.*cannot be reached"):
        stuck.save(stage, [Write(b"k", 2, b"third")], term=term, batch=2)
    for_ever.close()
    assert direct.load(stage, [b"k"]) == {b"k": Stored(2, term, 1, b"second")}
    store.close()
    stuck.close()


def test_a_full_server_is_terminal_and_nothing_of_a_script_is_written(stage):
    with server(*DURABLE, "--maxmemory-policy", "noeviction") as valkey:
        store = open_store(f"{valkey.url}?retry_for=0.3")
        term = begun(store, stage)
        valkey.client.config_set("maxmemory", 1)
        writes = [Write(b"k", 1, b"second"), *(Write(b"%d" % i, 0, bytes(1000)) for i in range(100))]
        with pytest.raises(Terminal, match="Raise maxmemory"):
            store.save(stage, writes, term=term, batch=1)
        valkey.client.config_set("maxmemory", 0)
        assert dict(store.scan(stage)) == {b"k": Stored(1, term, 0, b"first")}
        store.save(stage, writes, term=term, batch=1)
        assert len(list(store.scan(stage))) == 101
        store.close()


def test_a_server_that_was_emptied_under_a_running_flow_stops_it(stage):
    with server(*DURABLE) as valkey:
        store = open_store(valkey.url)
        term = begun(store, stage)
        valkey.client.flushall()
        with pytest.raises(Terminal, match="emptied or replaced"):
            store.save(stage, [Write(b"new", 0, b"")], term=term, batch=1)
        assert valkey.client.dbsize() == 0
        store.close()


def test_a_lost_hash_of_the_flow_does_not_give_a_term_again(valkey, direct, stage):
    begun(direct, stage)
    term = direct.acquire_term(stage.flow_ref)
    valkey.client.delete(f"hw:{{{stage.flow}:1}}")
    assert direct.acquire_term(stage.flow_ref) > term


# Set-up


@pytest.mark.parametrize(
    ("options", "risk", "remedy"),
    [
        (("--appendonly", "no"), "no-aof", "appendonly yes"),
        ((*DURABLE, "--maxmemory-policy", "allkeys-lru"), "eviction", "noeviction"),
    ],
)
def test_a_server_that_may_lose_states_is_refused_unless_told(stage, options, risk, remedy):
    with server(*options) as valkey:
        assert [(found.risk, found.unsafe) for found in preflight(valkey.url)] == [(risk, True)]
        store = open_store(valkey.url)
        with pytest.raises(Terminal, match=f"{remedy}.*accept={risk}"):
            store.acquire_term(stage.flow_ref)
        with pytest.raises(Terminal):
            store.install_term(stage.flow_ref, 3)
        told = open_store(f"{valkey.url}?accept={risk}")
        assert told.acquire_term(stage.flow_ref) == 1
        store.close()
        told.close()


def test_what_a_server_promises_depends_on_how_it_syncs():
    with server(*DURABLE) as valkey:
        store = open_store(valkey.url)
        assert preflight(valkey.url) == []
        assert (store.capabilities.durable, store.capabilities.ordered_durability) == (True, True)
        valkey.client.config_set("appendfsync", "everysec")
        again = open_store(valkey.url)
        assert [(found.risk, found.unsafe) for found in preflight(valkey.url)] == [("fsync", False)]
        assert (again.capabilities.durable, again.capabilities.ordered_durability) == (False, True)
        valkey.client.config_set("appendonly", "no")
        none = open_store(f"{valkey.url}?accept=no-aof")
        assert (none.capabilities.durable, none.capabilities.ordered_durability) == (False, False)
        for one in (store, again, none):
            one.close()


def test_a_replica_is_refused_and_named(stage):
    with server(*DURABLE) as primary, server(*DURABLE, "--replicaof", "127.0.0.1", str(primary.port)) as replica:
        until(lambda: replica.client.info("replication")["master_link_status"] == "up")
        store = open_store(f"{replica.url}?retry_for=0.3")
        with pytest.raises(Terminal, match=r"is a replica.*Name the primary"):
            store.acquire_term(stage.flow_ref)
        assert [found.risk for found in preflight(replica.url)] == ["replica"]
        store.close()


def test_wait_counts_a_write_only_when_a_replica_has_it(stage):
    with server(*DURABLE) as primary:
        store = open_store(f"{primary.url}?wait=1&wait_timeout=0.1&retry_for=0.5")
        with pytest.raises(Terminal, match="too few replicas"):
            store.acquire_term(stage.flow_ref)
        with server(*DURABLE, "--replicaof", "127.0.0.1", str(primary.port)) as replica:
            until(lambda: replica.client.info("replication")["master_link_status"] == "up")
            waiting = open_store(f"{primary.url}?wait=1&waitaof=1,1&wait_timeout=2&retry_for=20")
            term = begun(waiting, stage)
            replica.client.config_set("replica-serve-stale-data", "yes")
            assert replica.client.get(names(primary, stage)) == b"first"
            replica.signal(signal.SIGSTOP)
            try:
                with pytest.raises(Terminal, match=r"WAIT was answered \[0\]"):
                    store.save(stage, [Write(b"k", 1, b"second")], term=term, batch=1)
            finally:
                replica.signal(signal.SIGCONT)
            waiting.save(stage, [Write(b"k", 1, b"second")], term=term, batch=1)
            assert replica.client.get(names(primary, stage)) == b"second"
            waiting.close()
        store.close()


def test_a_wrong_password_is_terminal_and_not_in_the_message(stage, tmp_path):
    with server(*DURABLE) as valkey:
        valkey.client.config_set("requirepass", "hunter2")
        for login, says in (("", "wants a password"), (":hunter3@", "wrong")):
            store = open_store(valkey.url.replace("redis://", f"redis://{login}"))
            with pytest.raises(Terminal, match=says) as caught:
                store.acquire_term(stage.flow_ref)
            assert "hunter" not in str(caught.value)
            store.close()
        (tmp_path / "password").write_text("hunter2")
        for term, url in enumerate(
            (valkey.url.replace("redis://", "redis://:hunter2@"), f"{valkey.url}?password_file={tmp_path}/password"),
            start=1,
        ):
            right = open_store(url)
            assert right.acquire_term(stage.flow_ref) == term
            right.close()


def test_an_encrypted_connection_needs_a_trusted_certificate(valkey, direct, stage, tmp_path):
    with encrypted(valkey, tmp_path) as (port, authority):
        trusting = open_store(f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority}")
        term = begun(trusting, stage)
        assert direct.load(stage, [b"k"]) == {b"k": Stored(1, term, 0, b"first")}
        distrusting = open_store(f"rediss://127.0.0.1:{port}")
        with pytest.raises(Terminal, match=r"certificate is not trusted.*ssl_ca_certs"):
            distrusting.load(stage, [b"k"])
        plain = open_store(f"redis://127.0.0.1:{port}?retry_for=0.2")
        with pytest.raises(Transient):
            plain.load(stage, [b"k"])
        for store in (trusting, distrusting, plain):
            store.close()


def test_a_unix_socket_reaches_the_same_states(stage, tmp_path):
    path = tmp_path / "redis.sock"
    with server(*DURABLE, "--unixsocket", str(path)) as valkey:
        over_tcp, over_socket = open_store(valkey.url), open_store(f"redis+unix://{path}")
        term = begun(over_socket, stage)
        assert over_tcp.load(stage, [b"k"]) == {b"k": Stored(1, term, 0, b"first")}
        over_tcp.close()
        over_socket.close()


# States


def test_states_can_be_read_by_any_other_client(valkey, stage):
    store = open_store(valkey.url)
    term = store.acquire_term(stage.flow_ref)
    store.save(stage, [Write(b"N14228", 0, b'{"legs":7}')], term=term, batch=3)
    store.save_manifest(stage.flow_ref, Manifest(term=term, batch=3, positions={"legs": {0: Progress(12)}}))
    client = valkey.client
    name = names(valkey, stage, b"N14228")
    assert client.get(name) == b'{"legs":7}'
    assert client.hgetall(name.removesuffix(b":N14228")) == {b"N14228": b"1 %d 3" % term}
    flow = client.hgetall(f"hw:{{{stage.flow}:1}}")
    assert flow.keys() == {b"term", b"buckets", b"manifest", b"manifest_head"}
    assert json.loads(flow[b"manifest"])["positions"] == {"legs": {"0": {"next_offset": 12}}}
    store.close()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda client, name, heads: client.delete(name), "gone: evicted, expired, deleted"),
        (lambda client, name, heads: (client.delete(name), client.rpush(name, "x")), "another type"),
        (lambda client, name, heads: client.hdel(heads, "k"), "head is gone"),
        (lambda client, name, heads: client.hset(heads, "k", "x"), "head is gone or cannot be read"),
        (lambda client, name, heads: client.hset(heads, "k", "7 3"), "head is gone or cannot be read"),
    ],
    ids=["deleted", "type", "headless", "head", "short"],
)
def test_a_state_that_was_tampered_with_is_corrupt_and_never_empty(valkey, stage, damage, says):
    store = open_store(valkey.url)
    begun(store, stage, [b"a", b"k", b"z"])
    name = names(valkey, stage)
    damage(valkey.client, name, name.removesuffix(b":k"))
    with pytest.raises(Corrupt, match=f"stage aircraft, key b'k'.*{says}"):
        store.load(stage, [b"a", b"k", b"z"])
    assert store.load(stage, [b"a", b"z"]).keys() == {b"a", b"z"}
    store.close()


def test_a_state_with_a_damaged_head_is_not_replaced(valkey, stage):
    store = open_store(valkey.url)
    term = begun(store, stage, [b"a", b"k", b"z"])
    valkey.client.hset(names(valkey, stage).removesuffix(b":k"), "k", "x")
    with pytest.raises(Corrupt, match=r"stage aircraft, key b'k'.*head"):
        store.save(stage, [Write(key, 1, b"second") for key in (b"a", b"k", b"z")], term=term, batch=1)
    assert store.load(stage, [b"a"])[b"a"].version == 1
    store.close()


def test_heads_of_another_type_are_corrupt(valkey, stage):
    store = open_store(valkey.url)
    term = begun(store, stage)
    heads = names(valkey, stage).removesuffix(b":k")
    valkey.client.delete(heads)
    valkey.client.set(heads, "x")
    with pytest.raises(Corrupt, match=r"stage aircraft.*another type"):
        store.load(stage, [b"k"])
    with pytest.raises(Corrupt, match=r"stage aircraft.*another type"):
        store.save(stage, [Write(b"k", 1, b"second")], term=term, batch=1)
    assert valkey.client.get(names(valkey, stage)) == b"first"
    store.close()


def test_a_damaged_manifest_is_corrupt(valkey, direct, stage):
    flow = stage.flow_ref
    term = direct.acquire_term(flow)
    direct.save_manifest(flow, Manifest(term=term, batch=1))
    valkey.client.hset(f"hw:{{{stage.flow}:1}}", "manifest", b'{"term":1')
    with pytest.raises(Corrupt, match="the manifest cannot be read"):
        direct.load_manifest(flow)


def test_the_number_of_buckets_is_a_fact_of_the_flow(valkey, stage):
    first = open_store(f"{valkey.url}?buckets=3")
    keys = [b"%d" % i for i in range(20)]
    begun(first, stage, keys)
    default, other = open_store(valkey.url), open_store(f"{valkey.url}?buckets=5")
    assert default.load(stage, keys).keys() == set(keys)
    assert default.acquire_term(stage.flow_ref) == 2
    with pytest.raises(Terminal, match="has 3 buckets"):
        other.acquire_term(stage.flow_ref)
    for store in (first, default, other):
        store.close()


def test_prefixes_keep_stores_in_one_server_apart(valkey, stage):
    one, two = open_store(f"{valkey.url}?prefix=one"), open_store(f"{valkey.url}?prefix=two")
    begun(one, stage)
    assert two.installed_term(stage.flow_ref) == 0
    assert two.load(stage, [b"k"]) == {}
    one.close()
    two.close()

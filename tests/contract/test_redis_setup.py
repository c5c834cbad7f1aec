"""How Redis is set up: what is refused, what counts as durable, how it is reached."""

import signal
from contextlib import contextmanager

import pytest

from jobs.cli.errors import Exit
from persistence.errors import Terminal, Transient
from persistence.manifest import Manifest
from persistence.protocol import Stored, Write
from persistence.redis import open_store, preflight
from tests.support.cli import run
from tests.support.redis_server import DURABLE, encrypted, server, until, value_in
from tests.support.stores import begun

pytestmark = pytest.mark.integration


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
            store.acquire_epoch(stage.flow_ref)
        with pytest.raises(Terminal):
            store.install_epoch(stage.flow_ref, 3)
        told = open_store(f"{valkey.url}?accept={risk}")
        assert told.acquire_epoch(stage.flow_ref) == 1
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
        with pytest.raises(Terminal, match=r"is a replica.*Use the primary"):
            store.acquire_epoch(stage.flow_ref)
        assert [found.risk for found in preflight(replica.url)] == ["replica"]
        store.close()


def test_wait_counts_a_write_only_when_a_replica_has_it(stage):
    with server(*DURABLE) as primary:
        store = open_store(f"{primary.url}?wait=1&wait_timeout=0.1&retry_for=0.5")
        with pytest.raises(Terminal, match="too few replicas"):
            store.acquire_epoch(stage.flow_ref)
        with server(*DURABLE, "--replicaof", "127.0.0.1", str(primary.port)) as replica:
            until(lambda: replica.client.info("replication")["master_link_status"] == "up")
            waiting = open_store(f"{primary.url}?wait=1&waitaof=1,1&wait_timeout=2&retry_for=20")
            epoch = begun(waiting, stage)
            replica.client.config_set("replica-serve-stale-data", "yes")
            assert value_in(replica.client, stage) == b"first"
            replica.signal(signal.SIGSTOP)
            try:
                with pytest.raises(Terminal, match=r"WAIT returned \[0\]"):
                    store.save(stage, [Write(b"k", 1, b"second")], epoch=epoch, batch=1)
            finally:
                replica.signal(signal.SIGCONT)
            waiting.save(stage, [Write(b"k", 1, b"second")], epoch=epoch, batch=1)
            assert value_in(replica.client, stage) == b"second"
            waiting.close()
        store.close()


def test_a_wrong_password_is_terminal_and_not_in_the_message(stage, tmp_path):
    with server(*DURABLE) as valkey:
        valkey.client.config_set("requirepass", "hunter2")
        for login, says in (("", "requires a password"), (":hunter3@", "wrong")):
            store = open_store(valkey.url.replace("redis://", f"redis://{login}"))
            with pytest.raises(Terminal, match=says) as caught:
                store.acquire_epoch(stage.flow_ref)
            assert "hunter" not in str(caught.value)
            store.close()
        (tmp_path / "password").write_text("hunter2")
        for epoch, url in enumerate(
            (valkey.url.replace("redis://", "redis://:hunter2@"), f"{valkey.url}?password_file={tmp_path}/password"),
            start=1,
        ):
            right = open_store(url)
            assert right.acquire_epoch(stage.flow_ref) == epoch
            right.close()


def test_an_encrypted_connection_needs_a_trusted_certificate(valkey, direct, stage, tmp_path):
    with encrypted(valkey, tmp_path) as (port, authority):
        trusting = open_store(f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority}")
        epoch = begun(trusting, stage)
        assert direct.load(stage, [b"k"]) == {b"k": Stored(1, epoch, 0, b"first")}
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
        epoch = begun(over_socket, stage)
        assert over_tcp.load(stage, [b"k"]) == {b"k": Stored(1, epoch, 0, b"first")}
        over_tcp.close()
        over_socket.close()


@pytest.fixture
def replicated():
    """A primary, and a replica that has all of it."""
    with server(*DURABLE) as primary, server(*DURABLE, "--replicaof", "127.0.0.1", str(primary.port)) as replica:
        until(lambda: replica.client.info("replication")["master_link_status"] == "up")
        yield primary, replica


@contextmanager
def frozen(replica):
    replica.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        replica.signal(signal.SIGCONT)


WAITS = pytest.mark.parametrize(
    ("options", "answered"), [("wait=1", r"WAIT returned \[0\]"), ("waitaof=1,1", r"WAITAOF returned \[1, 0\]")]
)


@WAITS
def test_replicas_and_disks_are_waited_for_each_by_its_own_option(replicated, stage, options, answered):
    primary, replica = replicated
    store = open_store(f"{primary.url}?{options}&wait_timeout=0.3&retry_for=0.3")
    patient = open_store(f"{primary.url}?{options}&timeout=30&wait_timeout=20&retry_for=1")
    epoch = begun(patient, stage)
    with frozen(replica), pytest.raises(Terminal, match=answered):
        store.save(stage, [Write(b"k", 1, b"second")], epoch=epoch, batch=1)
    patient.save(stage, [Write(b"k", 1, b"second")], epoch=epoch, batch=1)
    assert value_in(replica.client, stage) == b"second"
    store.close()
    patient.close()


@WAITS
def test_what_is_sent_again_waits_again_although_the_primary_has_it(replicated, stage, options, answered):
    """A server answers a connection that wrote nothing at once: every repetition has to write."""
    primary, replica = replicated
    flow = stage.flow_ref
    url = f"{primary.url}?{options}&wait_timeout=0.3&retry_for=0.3"
    patient = open_store(f"{primary.url}?{options}&timeout=30&wait_timeout=20&retry_for=1")
    begun(patient, stage)
    manifest = Manifest(epoch=9, batch=0)
    with frozen(replica):
        for _ in range(3):  # the first writes the flow's hash, the next the bucket, the last what is there
            store = open_store(url)
            with pytest.raises(Terminal, match=answered):
                store.install_epoch(flow, 9)
            store.close()
        assert int(primary.client.hget(f"hw:{{{stage.flow}:1}}", "epoch")) == 9
        for _ in range(2):
            store = open_store(url)
            with pytest.raises(Terminal, match=answered):
                store.save_manifest(flow, manifest)
            store.close()
    patient.install_epoch(flow, 9)
    with frozen(replica):
        for _ in range(2):
            store = open_store(url)
            with pytest.raises(Terminal, match=answered):
                store.save(stage, [Write(b"k", 1, b"second")], epoch=9, batch=1)
            store.close()
    patient.save(stage, [Write(b"k", 1, b"second")], epoch=9, batch=1)
    assert value_in(replica.client, stage) == b"second"
    patient.save_manifest(flow, manifest)
    assert replica.client.hget(f"hw:{{{stage.flow}:1}}", "manifest_head") == b"9 0"
    patient.close()


@pytest.mark.parametrize(
    "words",
    [
        "inspect jobs.demo.flow:flow --stage carrier",
        "inspect jobs.demo.flow:flow --stage carrier --key UA",
        "audit jobs.demo.flow:flow",
        "snapshot jobs.demo.flow:flow --to file",
        "replay jobs.demo.flow:flow",
    ],
)
def test_a_user_without_the_right_to_read_is_told_so_in_one_line(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWATER_KAFKA_BOOTSTRAP", "127.0.0.1:1")
    with server(*DURABLE) as valkey:
        valkey.client.execute_command("ACL", "SETUSER", "nobody", "on", ">hunter2", "~*", "+ping", "+info", "+hello")
        (tmp_path / "password").write_text("hunter2")
        url = f"redis://nobody@127.0.0.1:{valkey.port}?password_file={tmp_path}/password"
        assert run(monkeypatch, *words.split(), "--store", url) == Exit.FAILED
        [line] = [one for one in capsys.readouterr().err.splitlines() if one.startswith("headwater: ")]
        assert "the user may not run a command or access a key (NOPERM)" in line
        assert "Grant it +@read" in line
        assert "hunter2" not in line
        assert sorted(one.name for one in tmp_path.iterdir()) == ["password"]
        assert valkey.client.dbsize() == 0

"""A separate node that requires a login, offers TLS, and is killed."""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from jobs.stack import cassandra, process
from persistence.cassandra import apply_schema, open_store, preflight
from persistence.cassandra.driver import connect
from persistence.cassandra.paxos import SERIAL_READS
from persistence.cassandra.settings import CassandraSettings
from persistence.errors import Terminal
from persistence.protocol import FlowRef, Manifest, Stored, Write

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.kills]

_SECURED = """\
authenticator: PasswordAuthenticator
authorizer: CassandraAuthorizer
client_encryption_options:
  enabled: true
  optional: true
  keystore: {pem}
  ssl_context_factory:
    class_name: org.apache.cassandra.security.PEMBasedSslContextFactory
"""


class Node:
    """A Cassandra process that can be killed and started again on the same data and port."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.launch = cassandra.prepare(home, heap_mb=512, progress=lambda _line: None)
        config = home / "cassandra.yaml"
        config.write_text(config.read_text() + _SECURED.format(pem=certificates(home)))
        self.start()

    def start(self) -> None:
        self.pid = process.spawn(self.launch.command, self.home / "log", self.home, self.launch.environment)
        self.started = process.start_of(self.pid) or ""
        while not self.launch.is_ready():
            assert process.start_of(self.pid) == self.started, (self.home / "log").read_text()[-2000:]
            time.sleep(0.1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        process.stop(self.pid, self.started, 20)

    def url(self, options: str = "", user: str = "cassandra") -> str:
        port = urlsplit(self.launch.address).port
        secret = f"password_file={self.home}/password&" if user else ""
        return f"cassandra://{user}{'@' * bool(user)}localhost:{port}/own?replication=1&{secret}{options}"


def certificates(home: Path) -> Path:
    """A CA, and a certificate for 127.0.0.1 with its key in one PEM file."""
    (home / "extensions").write_text("subjectAltName = IP:127.0.0.1\n")
    for line in (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem",
        "req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout node.key -out node.csr",
        "x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out node.crt",
    ):
        subprocess.run(["openssl", *line.split()], cwd=home, check=True, capture_output=True)
    pem = home / "node.pem"
    pem.write_text("".join((home / name).read_text() for name in ("node.key", "node.crt", "ca.pem")))
    (home / "password").write_text("cassandra\n")
    return pem


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    node = Node(tmp_path_factory.mktemp("node"))
    try:
        deadline = time.monotonic() + 60
        while True:  # the node creates its first user some time after it has begun to serve
            try:
                apply_schema(node.url(f"tls_ca={node.home}/ca.pem"))
                break
            except Terminal as error:
                assert "login was refused" in str(error)
                assert time.monotonic() < deadline
                time.sleep(0.5)
        yield node
    finally:
        node.kill()


@pytest.fixture
def opened():
    stores = []

    def opening(url):
        stores.append(open_store(url))
        return stores[-1]

    yield opening
    for store in stores:
        store.close()


@pytest.mark.parametrize("options", ["", "tls_ca={home}/ca.pem"])
def test_a_login_works_with_and_without_tls(node, opened, options):
    assert opened(node.url(options.format(home=node.home))).installed_epoch(FlowRef("nobody")) == 0


def test_a_connection_with_tls_is_encrypted(node):
    cluster, session = connect(CassandraSettings.parse(node.url(f"tls_ca={node.home}/ca.pem")))
    rows = session.execute("SELECT ssl_enabled FROM system_views.clients")
    assert (True,) in list(rows)
    cluster.shutdown()


def test_a_wrong_password_is_terminal_and_not_shown(node, opened, tmp_path):
    (tmp_path / "wrong").write_text("hunter2")
    url = node.url(user="").replace("://", "://cassandra@") + f"password_file={tmp_path}/wrong"
    with pytest.raises(Terminal, match=r"login was refused.*password_file") as caught:
        opened(url).installed_epoch(FlowRef("fleet"))
    assert "hunter2" not in str(caught.value)


def test_no_login_at_all_is_terminal(node, opened):
    with pytest.raises(Terminal, match="login was refused"):
        opened(node.url(user="")).installed_epoch(FlowRef("fleet"))


def test_a_certificate_of_an_unknown_authority_is_terminal(node, opened):
    with pytest.raises(Terminal, match=r"CERTIFICATE_VERIFY_FAILED.*tls_ca"):
        opened(node.url("tls=on")).installed_epoch(FlowRef("fleet"))
    with pytest.raises(Terminal, match="CERTIFICATE_VERIFY_FAILED"):
        apply_schema(node.url("tls=on"))


def test_a_host_name_may_be_left_unchecked(node, opened):
    url = node.url(f"tls_ca={node.home}/ca.pem&tls_hostname=ignore")
    assert opened(url).installed_epoch(FlowRef("nobody")) == 0


def test_a_user_without_rights_is_told_which_and_sees_no_settings(node, opened, tmp_path):
    cluster, session = connect(CassandraSettings.parse(node.url()))
    session.execute("CREATE ROLE reader WITH PASSWORD = 'read' AND LOGIN = true")
    session.execute("GRANT SELECT ON KEYSPACE own TO reader")
    cluster.shutdown()
    (tmp_path / "password").write_text("read")
    url = f"{node.url(user='').replace('://', '://reader@')}password_file={tmp_path}/password"
    reader = opened(url)
    assert reader.load(FlowRef("nobody").stage("s"), [b"k"]) == {}
    with pytest.raises(Terminal, match="GRANT"):
        reader.acquire_epoch(FlowRef("fleet"))
    assert not reader.capabilities.durable
    hidden = {finding.risk: finding for finding in preflight(url)}["hidden-settings"]
    assert hidden.unsafe
    assert "commitlog_sync, paxos_variant" in hidden.what


def test_what_was_acknowledged_survives_kill_9_and_an_open_handle_goes_on(node, opened):
    flow = FlowRef("killed")
    stage = flow.stage("aircraft")
    store = opened(node.url("retry_for=300&concurrency=4"))
    epoch = store.acquire_epoch(flow)
    keys = [b"%04d" % i for i in range(500)]
    for version in range(3):
        store.save(stage, [Write(key, version, b"%d" % version) for key in keys], epoch=epoch, batch=version)
    manifest = Manifest(epoch=epoch, batch=2)
    store.save_manifest(flow, manifest)
    node.kill()
    node.start()
    assert store.load(stage, keys) == dict.fromkeys(keys, Stored(3, epoch, 2, b"2"))
    assert store.load_manifest(flow) == manifest
    # Statements that were prepared before are prepared again.
    store.save(stage, [Write(key, 3, b"3") for key in keys], epoch=epoch, batch=3)
    assert {state.version for _, state in store.scan(stage)} == {4}


def test_a_node_that_gives_linearizability_up_is_refused_by_name(node, opened):
    assert {finding.risk for finding in preflight(node.url()) if finding.unsafe} == {"replication-1"}
    config, launch = node.home / "cassandra.yaml", node.launch
    text = config.read_text()
    assert "paxos_variant: v2" in text
    config.write_text(
        text.replace("paxos_variant: v2", "paxos_variant: v1\nskip_paxos_repair_on_topology_change: true")
    )
    node.launch = replace(launch, command=(launch.command[0], f"-D{SERIAL_READS}=true", *launch.command[1:]))
    node.kill()
    node.start()
    try:
        found = {finding.risk: finding for finding in preflight(node.url("retry_for=300"))}
        unsafe = {risk for risk, finding in found.items() if finding.unsafe}
        assert unsafe == {"replication-1", "paxos-v1", "serial-reads", "paxos-repair"}
        assert "while ranges move" in found["paxos-v1"].what
        store = opened(node.url("retry_for=300"))
        assert store.acquire_epoch(FlowRef("accepted")) == 1  # a run may accept it
    finally:
        config.write_text(text)
        node.launch = launch
        node.kill()
        node.start()

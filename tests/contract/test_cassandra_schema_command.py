"""`headwater schema` on a real server: the tables, the output, and a store that works afterwards."""

import json
import uuid

import pytest

from jobs.cli.errors import Exit
from persistence.cassandra import open_store
from persistence.cassandra.driver import connect
from persistence.cassandra.settings import CassandraSettings
from persistence.protocol import FlowRef
from tests.support.cli import run


@pytest.fixture
def url(cassandra_url):
    """A keyspace that is not there yet, dropped afterwards."""
    name = f"command_{uuid.uuid4().hex[:12]}"
    yield f"{cassandra_url}/{name}?replication=1"
    cluster, session = connect(CassandraSettings.parse(f"{cassandra_url}/{name}"))
    session.execute(f"DROP KEYSPACE IF EXISTS {name}", timeout=60)
    cluster.shutdown()


def headwater(monkeypatch, capsys, *arguments):
    """Run a command here: (exit code, standard output, lines of standard error)."""
    code = run(monkeypatch, *arguments)
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


def test_apply_creates_what_is_missing_says_so_and_the_store_works(url, monkeypatch, capsys):
    keyspace = CassandraSettings.parse(url).keyspace
    code, out, _ = headwater(monkeypatch, capsys, "schema", "apply", url, "--json")
    assert code == Exit.DONE
    tables = [f"table {keyspace}.{name}" for name in ("flow", "state", "due")]
    assert json.loads(out) == {"created": [f"keyspace {keyspace}", *tables]}
    store = open_store(url)
    assert store.acquire_epoch(FlowRef("fleet")) == 1
    store.close()

    code, out, err = headwater(monkeypatch, capsys, "schema", "apply", url)
    assert (code, out, err[-1]) == (Exit.DONE, "", "all tables exist already")


def test_what_print_shows_is_all_that_a_store_needs(url, cassandra_url, monkeypatch, capsys):
    code, out, _ = headwater(monkeypatch, capsys, "schema", "print", url)
    assert code == Exit.DONE
    cluster, session = connect(CassandraSettings.parse(url))
    for statement in out.split(";\n"):
        if statement.strip():
            session.execute(statement, timeout=60)
    cluster.shutdown()
    _, out, _ = headwater(monkeypatch, capsys, "schema", "apply", url, "--json")
    assert json.loads(out) == {"created": []}


def test_more_copies_than_nodes_and_a_server_that_is_away_are_one_line_and_exit_code_one(url, monkeypatch, capsys):
    code, out, err = headwater(monkeypatch, capsys, "schema", "apply", url.replace("replication=1", "replication=3"))
    assert (code, out) == (Exit.FAILED, "")
    assert "3 replicas are requested" in err[-1]
    code, out, err = headwater(monkeypatch, capsys, "schema", "apply", "cassandra://127.0.0.1:1/fleet")
    assert (code, out) == (Exit.FAILED, "")
    assert err[-1].startswith("headwater: no host can be reached")
    assert not any("Traceback" in line for line in err)

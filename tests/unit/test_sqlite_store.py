import functools
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from persistence.errors import Corrupt, Terminal, Transient
from persistence.protocol import FlowRef, Manifest, Write
from persistence.registry import open_store
from persistence.sqlite.database import _after_fork_in_child, _inherited
from persistence.sqlite.errors import translate

FLOW = FlowRef("fleet")
STAGE = FLOW.stage("aircraft")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "directory" / "states.db"


@pytest.fixture
def store(path):
    store = open_store(f"sqlite://{path}")
    yield store
    store.close()


def put(store, *keys):
    epoch = store.acquire_epoch(FLOW)
    store.save(STAGE, [Write(key, 0, b'{"legs":1}') for key in keys], epoch=epoch, batch=3)
    return epoch


def traced(store, call):
    """The statements that a call executes."""
    statements = []
    with store._database.reading(FLOW) as connection:
        connection.set_trace_callback(statements.append)
        call()
        connection.set_trace_callback(None)
    return statements


def run_sql(path, sql):
    connection = sqlite3.connect(path)
    with connection:
        rows = connection.execute(sql).fetchall()
    connection.close()
    return rows


def test_it_writes_ahead_and_syncs_every_commit(store, path):
    put(store, b"k")
    assert run_sql(path, "PRAGMA journal_mode") == [("wal",)]
    with store._database.reading(FLOW) as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_the_wait_for_a_lock_is_as_long_as_the_url_says(path):
    store = open_store(f"sqlite://{path}?busy_timeout=0.25")
    store.acquire_epoch(FLOW)
    with store._database.reading(FLOW) as connection:
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (250,)
    store.close()


def test_marks_that_cannot_be_read_name_their_stage(store, monkeypatch):
    def locked():
        raise sqlite3.OperationalError("database is locked")

    put(store, b"k")
    monkeypatch.setattr(store._database, "_open", locked)
    with pytest.raises(Terminal, match="stage aircraft: database is locked"):
        store.marks(STAGE)


def test_a_save_of_states_that_nobody_else_changed_reads_none_of_them(store):
    epoch = put(store, b"old")
    writes = [Write(b"old", 1, b"{}"), Write(b"new", 0, b"{}")]
    statements = traced(store, lambda: store.save(STAGE, writes, epoch=epoch, batch=4))
    assert any("UPDATE state" in one for one in statements)
    assert not any("FROM state" in one for one in statements)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 512])
def test_a_load_asks_for_less_than_twice_as_many_keys_as_it_was_given(store, count):
    put(store, b"k")
    (select,) = (
        one for one in traced(store, lambda: store.load(STAGE, [b"%d" % i for i in range(count)])) if "key IN" in one
    )
    assert count <= select.count("x'") < 2 * count


def test_states_can_be_read_by_a_person(store, path):
    epoch = put(store, b"N14228")
    assert run_sql(path, "SELECT * FROM readable") == [("fleet", 1, "aircraft", "N14228", 1, epoch, 3, '{"legs":1}')]


def test_a_locked_file_is_transient_after_a_bounded_wait(store, path):
    epoch = put(store)
    impatient = open_store(f"sqlite://{path}?busy_timeout=0.05")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(Transient, match=r"aircraft.*locked.*busy_timeout"):
        impatient.save(STAGE, [Write(b"k", 0, b"")], epoch=epoch, batch=0)
    holder.execute("ROLLBACK")
    impatient.save(STAGE, [Write(b"k", 0, b"")], epoch=epoch, batch=0)
    holder.close()
    impatient.close()


def test_a_full_disk_is_terminal_and_nothing_of_the_call_is_written(store, path):
    epoch = put(store, b"k")
    with store._database.reading(FLOW) as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Terminal, match="Free space"):
        store.save(STAGE, [Write(b"%d" % i, 0, bytes(5000)) for i in range(50)], epoch=epoch, batch=4)
    assert [key for key, _ in store.scan(STAGE)] == [b"k"]


def test_a_damaged_file_is_corrupt_and_not_empty(store, path):
    put(store, *[b"%04d" % i for i in range(2000)])
    store.close()
    damaged = bytearray(path.read_bytes())
    damaged[4096:-4096] = bytes(len(damaged) - 8192)
    path.write_bytes(damaged)
    with pytest.raises(Corrupt, match="Restore"):
        store.load(STAGE, [b"0000"])


def test_a_file_without_marks_gets_them_and_keeps_its_states(store, path):
    epoch = put(store, b"k")
    store.close()
    for change in ("DROP VIEW readable", *(f"ALTER TABLE stage DROP COLUMN {one}" for one in ("mark", "downstream"))):
        run_sql(path, change)
    without_due_times(path)
    run_sql(path, "PRAGMA user_version = 1")
    assert store.load(STAGE, [b"k"]).keys() == {b"k"}
    assert {name: one.mark.count for name, one in store.marks(STAGE).items()} == {"0": 0}
    marks = store.save(STAGE, [Write(b"new", 0, b"{}")], epoch=epoch, batch=9)
    assert {name: mark.count for name, mark in marks.items()} == {"0": 1}


def test_a_file_without_due_times_gets_them_and_keeps_its_states(store, path):
    epoch = put(store, b"k")
    store.close()
    without_due_times(path)
    run_sql(path, "PRAGMA user_version = 2")
    assert store.load(STAGE, [b"k"]).keys() == {b"k"}
    store.save(STAGE, [Write(b"new", 0, b"{}", 5)], epoch=epoch, batch=9)
    assert store.remove(STAGE, 5, epoch=epoch, batch=9).states == 1
    assert store.load(STAGE, [b"k", b"new"]).keys() == {b"k"}


def without_due_times(path):
    run_sql(path, "DROP VIEW IF EXISTS readable")
    run_sql(path, "DROP INDEX state_due")
    run_sql(path, "ALTER TABLE state DROP COLUMN due")
    run_sql(path, "ALTER TABLE stage DROP COLUMN removed")


def test_a_state_that_was_tampered_with_into_text_is_corrupt(store, path):
    put(store, b"k")
    run_sql(path, "UPDATE state SET value = 'text'")
    with pytest.raises(Corrupt, match="stage aircraft, key b'k'"):
        store.load(STAGE, [b"k"])


def test_a_damaged_manifest_is_corrupt(store, path):
    epoch = put(store)
    store.save_manifest(FLOW, Manifest(epoch=epoch, batch=1))
    run_sql(path, "UPDATE flow SET manifest = substr(manifest, 1, 20)")
    with pytest.raises(Corrupt, match="flow fleet"):
        store.load_manifest(FLOW)


def test_a_directory_that_cannot_be_made_is_terminal(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Terminal, match=r"cannot be created: File exists\. Choose another directory"):
        open_store(f"sqlite://{tmp_path}/file/x.db").acquire_epoch(FLOW)


def test_a_path_that_leads_through_a_file_is_no_empty_store(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Terminal, match=r"x\.db cannot be opened: Not a directory.* Check the path and its permissions"):
        open_store(f"sqlite://{tmp_path}/file/x.db").installed_epoch(FLOW)


def test_a_file_that_another_process_creates_between_two_looks_at_it_is_ours(path, monkeypatch):
    class Interrupted(sqlite3.Connection):
        """Lets another process create the file after the first look, if it can within a moment."""

        def execute(self, sql, *parameters):
            if sql == "PRAGMA user_version":
                monkeypatch.undo()
                with suppress(Transient):
                    open_store(f"sqlite://{path}?busy_timeout=0.1").acquire_epoch(FLOW)
            return super().execute(sql, *parameters)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Interrupted))
    open_store(f"sqlite://{path}").acquire_epoch(FLOW)
    assert open_store(f"sqlite://{path}").installed_epoch(FLOW) >= 1


@pytest.fixture
def writer(store, path):
    """Another program within a transaction of the file, which it has taken back to a rollback journal."""
    put(store, b"k")
    store.close()
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA journal_mode = DELETE")
    writer.execute("BEGIN IMMEDIATE")
    yield writer
    writer.close()


def test_the_switch_to_wal_waits_until_another_writer_has_ended(store, writer, monkeypatch):
    class Refused(sqlite3.Connection):
        """Ends the other writer once it was in the way."""

        def execute(self, sql, *parameters):
            try:
                return super().execute(sql, *parameters)
            except sqlite3.OperationalError:
                writer.close()
                refused.append(sql)
                raise

    refused = []
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Refused))
    assert store.load(STAGE, [b"k"])
    assert refused == ["PRAGMA journal_mode = WAL"]


def test_the_switch_to_wal_waits_no_longer_than_for_a_lock(path, writer):
    with pytest.raises(Transient, match=r"locked.*busy_timeout"):
        open_store(f"sqlite://{path}?busy_timeout=0.05").load(STAGE, [b"k"])


def test_a_file_system_that_cannot_share_memory_is_refused(path, monkeypatch):
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda file, **options: connect(f"file:{file}?vfs=unix-dotfile", uri=True, **options)
    )
    with pytest.raises(Terminal, match=r"cannot use a write-ahead log\. Use a file on a local disk"):
        open_store(f"sqlite://{path}").acquire_epoch(FLOW)


def test_a_child_of_a_fork_opens_the_file_anew_whoever_held_the_handle_and_leaves_the_parents_connection_open(store):
    put(store, b"k")
    parents = store._database._connection
    with ThreadPoolExecutor(1) as other:
        other.submit(store._database._lock.acquire).result()
        _after_fork_in_child()
        assert store.load(STAGE, [b"k"])
    assert store._database._connection is not parents
    assert parents.execute("SELECT 1").fetchone() == (1,)
    assert any(one is parents for one in _inherited)
    store.close()
    _after_fork_in_child()
    assert store.load(STAGE, [b"k"])
    assert all(_inherited)


def test_an_error_without_a_result_code_is_terminal_with_a_remedy():
    translated = translate(sqlite3.ProgrammingError("closed"), "states.db", FLOW)
    assert type(translated) is Terminal
    assert str(translated) == "flow fleet, generation 1: closed (states.db). See the result codes of SQLite"


@pytest.mark.parametrize(
    ("at", "call"),
    [
        (FLOW, lambda store: store.acquire_epoch(FLOW)),
        (FLOW, lambda store: store.install_epoch(FLOW, 1)),
        (FLOW, lambda store: store.installed_epoch(FLOW)),
        (FLOW, lambda store: store.load_manifest(FLOW)),
        (FLOW, lambda store: store.save_manifest(FLOW, Manifest(epoch=1, batch=1))),
        (STAGE, lambda store: store.load(STAGE, [b"k"])),
        (STAGE, lambda store: store.save(STAGE, [Write(b"k", 0, b"")], epoch=1, batch=1)),
        (STAGE, lambda store: list(store.scan(STAGE))),
    ],
)
def test_an_error_says_which_flow_or_stage_it_is_about(store, path, at, call):
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(Corrupt) as caught:
        call(store)
    assert caught.value.ref == at


def test_what_somebody_else_wrote_into_the_tables_is_corrupt_and_names_its_place(store, path):
    epoch = put(store, b"k")
    run_sql(path, "UPDATE state SET value = 'text'")
    for read in (lambda: list(store.scan(STAGE)), lambda: store.load(STAGE, [b"k"])):
        with pytest.raises(Corrupt, match="the state is a str, not bytes") as caught:
            read()
        assert (caught.value.ref, caught.value.key) == (STAGE, b"k")
    run_sql(path, "UPDATE flow SET manifest = x'00'")
    for read in (lambda: store.load_manifest(FLOW), lambda: store.save_manifest(FLOW, Manifest(epoch=epoch, batch=9))):
        with pytest.raises(Corrupt) as caught:
            read()
        assert caught.value.ref == FLOW


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_BUSY_SNAPSHOT, Transient),
        (sqlite3.SQLITE_LOCKED, Transient),
        (sqlite3.SQLITE_NOMEM, Transient),
        (sqlite3.SQLITE_CORRUPT_VTAB, Corrupt),
        (sqlite3.SQLITE_NOTADB, Corrupt),
        (sqlite3.SQLITE_READONLY_DIRECTORY, Terminal),
        (sqlite3.SQLITE_IOERR_FSYNC, Terminal),
        (sqlite3.SQLITE_CANTOPEN, Terminal),
        (sqlite3.SQLITE_ERROR, Terminal),
    ],
)
def test_result_codes_become_errors_with_a_remedy(code, kind):
    error = sqlite3.OperationalError("what it says")
    error.sqlite_errorcode = code
    translated = translate(error, "states.db", STAGE)
    assert type(translated) is kind
    assert translated.ref == STAGE
    assert translated.remedy
    assert "states.db" in str(translated)

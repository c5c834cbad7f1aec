"""What the Cassandra store does with its tables on a real server: laid out, read by others, emptied, damaged."""

import os
import subprocess
import sys
import uuid
from urllib.parse import urlsplit

import pytest
from cassandra import ConsistencyLevel

from persistence.cassandra import apply_schema, open_store, preflight, schema
from persistence.cassandra.buckets import bucket_of
from persistence.cassandra.driver import connect
from persistence.cassandra.settings import CassandraSettings
from persistence.errors import Conflict, Corrupt, Fenced, Terminal
from persistence.protocol import FlowRef, Manifest, Progress, Stored, Write


@pytest.fixture(scope="module")
def session(cassandra_url):
    """A separate connection, to inspect and damage the tables."""
    cluster, session = connect(CassandraSettings.parse(f"{cassandra_url}/any"))
    yield session
    cluster.shutdown()


@pytest.fixture
def own_keyspace(cassandra_url, session):
    """A keyspace for one test, which may break it."""
    name = f"own_{uuid.uuid4().hex}"
    apply_schema(f"{cassandra_url}/{name}?replication=1")
    yield name
    session.execute(f"DROP KEYSPACE {name}", timeout=60)


@pytest.fixture
def opened(cassandra_url):
    """Opens stores and closes them: `opened(keyspace, "buckets=4")`."""
    stores = []

    def opening(keyspace, options=""):
        stores.append(open_store(f"{cassandra_url}/{keyspace}?{options}"))
        return stores[-1]

    yield opening
    for store in stores:
        store.close()


def begun(store, stage, keys=(b"N14228",)):
    epoch = store.acquire_epoch(stage.flow_ref)
    store.save(stage, [Write(key, 0, b'{"legs":1}') for key in keys], epoch=epoch, batch=3)
    return epoch


def test_opening_connects_to_nothing():
    store = open_store("cassandra://127.0.0.1:1/fleet")
    store.close()


@pytest.mark.parametrize("missing", ["keyspace", "table"])
def test_a_store_without_its_tables_is_terminal_and_names_the_command(opened, own_keyspace, session, missing):
    if missing == "table":
        session.execute(f"DROP TABLE {own_keyspace}.state", timeout=60)
    store = opened(own_keyspace if missing == "table" else "nobody_made_this")
    with pytest.raises(Terminal, match="headwater schema apply"):
        store.acquire_epoch(FlowRef("fleet"))


def test_applying_the_schema_again_changes_nothing(cassandra_url, opened, own_keyspace, stage):
    store = opened(own_keyspace)
    begun(store, stage)
    told = []
    assert apply_schema(f"{cassandra_url}/{own_keyspace}?replication=1", told.append) == []
    assert told[0].startswith("connecting to cassandra://127.0.0.1")
    assert told[1:] == [
        line.partition("\n")[0].removesuffix(" (") for line in schema(f"cassandra://h/{own_keyspace}?replication=1")
    ]
    assert len(store.load(stage, [b"N14228"])) == 1


def test_tables_of_other_columns_are_refused_when_applied_and_when_used(cassandra_url, opened, own_keyspace, session):
    session.execute(f"ALTER TABLE {own_keyspace}.state DROP batch_number", timeout=60)
    with pytest.raises(Terminal, match="not those of this version"):
        apply_schema(f"{cassandra_url}/{own_keyspace}?replication=1")
    with pytest.raises(Terminal, match="not those of this version"):
        opened(own_keyspace).installed_epoch(FlowRef("fleet"))


@pytest.mark.parametrize("replication", ["3", "datacenter1:2", "nowhere:1"])
def test_more_copies_than_nodes_are_refused_before_anything_is_made(cassandra_url, session, replication):
    with pytest.raises(Terminal, match=r"replicas are requested in data centre.*replication=1"):
        apply_schema(f"{cassandra_url}/too_many?replication={replication}")
    rows = session.execute("SELECT keyspace_name FROM system_schema.keyspaces")
    assert ("too_many",) not in list(rows)


def test_states_and_manifests_can_be_read_in_cqlsh(opened, keyspace, session, stage):
    store = opened(keyspace, "buckets=8")
    epoch = begun(store, stage)
    store.save_manifest(stage.flow_ref, Manifest(epoch=epoch, batch=3, positions={"legs": {0: Progress(9)}}))
    bucket = bucket_of(b"N14228", 8)
    state = session.execute(
        "SELECT blob_as_text(key), fence, version, epoch, batch_number, blob_as_text(value) "
        f"FROM {keyspace}.state WHERE flow = %s AND generation = 1 AND stage = 'aircraft' AND bucket = %s",
        (stage.flow, bucket),
    )
    assert list(state) == [("N14228", epoch, 1, epoch, 3, '{"legs":1}')]
    flow = session.execute(
        f"SELECT stage, buckets, mode, fenced, epoch, manifest FROM {keyspace}.flow WHERE flow = %s AND generation = 1",
        (stage.flow,),
    )
    (row,) = flow
    assert row[:5] == ("aircraft", 8, "conditional", True, epoch)
    assert row[5].startswith('{"epoch":')


def test_what_decides_is_read_at_the_serial_consistency_and_states_are_not(opened, keyspace, stage):
    store = opened(keyspace, "buckets=1")
    reads = {}

    def listen(request):
        text = getattr(getattr(request.query, "prepared_statement", None), "query_string", "")
        if text.startswith("SELECT"):
            what = text.removeprefix("SELECT ").partition(f" FROM {keyspace}.")[0]
            reads.setdefault(what, set()).add(ConsistencyLevel.is_serial(request.message.consistency_level))

    store._client.live(stage).session.add_request_init_listener(listen)
    epoch = begun(store, stage)
    store.save(stage, [Write(b"N14228", 1, b"2")], epoch=epoch, batch=4)
    with pytest.raises(Conflict):
        store.save(stage, [Write(b"N14228", 1, b"3")], epoch=epoch, batch=5)
    store.save_manifest(stage.flow_ref, Manifest(epoch=epoch, batch=4))
    store.marks(stage)
    states = "key, version, epoch, batch_number, value"
    decisive = (
        "epoch, manifest",
        "stage, buckets, mode, fenced, indexed",
        "fence",
        "mark, downstream, removed",
        states,
    )
    assert reads == {what: {True} for what in decisive}
    reads.clear()
    store.load(stage, [b"N14228"])
    assert reads == {states: {False}}


def test_in_timestamp_mode_epoch_and_version_are_the_timestamp_of_a_state(opened, keyspace, session, stage):
    store = opened(keyspace, "buckets=1&mode=timestamp")
    epoch = begun(store, stage)
    store.save(stage, [Write(b"N14228", 1, b"2")], epoch=epoch, batch=4)
    times = session.execute(
        f"SELECT writetime(value), writetime(mark) FROM {keyspace}.state "
        "WHERE flow = %s AND generation = 1 AND stage = 'aircraft' AND bucket = 0",
        (stage.flow,),
    )
    assert list(times) == [((epoch << 32) + 2, (epoch << 32) + 4)]


def test_a_stage_keeps_the_buckets_it_began_with(opened, keyspace, stage):
    keys = [b"%d" % i for i in range(50)]
    epoch = begun(opened(keyspace, "buckets=4"), stage, keys)
    other = opened(keyspace, "buckets=64")
    assert other.load(stage, keys).keys() == set(keys)
    other.save(stage, [Write(key, 1, b"2") for key in keys], epoch=epoch, batch=4)
    assert {key: state.version for key, state in other.scan(stage)} == dict.fromkeys(keys, 2)
    newer = other.acquire_epoch(stage.flow_ref)
    with pytest.raises(Fenced):
        opened(keyspace).save(stage, [Write(b"0", 2, b"3")], epoch=epoch, batch=5)
    other.save(stage, [Write(b"0", 2, b"3")], epoch=newer, batch=0)


def test_a_stage_keeps_the_mode_it_began_with(opened, keyspace, stage):
    epoch = begun(opened(keyspace), stage)
    other = opened(keyspace, "mode=timestamp")
    with pytest.raises(Terminal, match=r"aircraft.*mode=conditional.*new generation"):
        other.save(stage, [Write(b"N14228", 1, b"2")], epoch=epoch, batch=4)
    assert other.load(stage, [b"N14228"])[b"N14228"].version == 1


@pytest.mark.parametrize("mode", ["conditional", "timestamp"])
def test_values_of_every_size_go_through_bounded_batches_and_pages(opened, keyspace, stage, mode):
    store = opened(keyspace, f"buckets=1&mode={mode}&max_value_bytes=4194304")
    epoch = store.acquire_epoch(stage.flow_ref)
    sizes = [0, 1, 1000, 49_000, 200_000, 3 << 20] + [1000] * 300 + [60_000] * 20
    writes = [Write(b"%04d" % i, 0, bytes([i % 251]) * size) for i, size in enumerate(sizes)]
    store.save(stage, writes, epoch=epoch, batch=0)
    held = store.load(stage, [write.key for write in writes])
    assert held == {write.key: Stored(1, epoch, 0, write.value) for write in writes}
    assert dict(store.scan(stage)) == held


def test_a_conflict_in_one_batch_leaves_the_others_written_and_names_all_changed_keys(opened, keyspace, stage):
    store = opened(keyspace, "buckets=4")
    keys = [b"%03d" % i for i in range(200)]
    epoch = begun(store, stage, keys)
    stale = [key for i, key in enumerate(keys) if i % 50 == 0]
    store.save(stage, [Write(key, 1, b"theirs") for key in stale], epoch=epoch, batch=4)
    with pytest.raises(Conflict) as caught:
        store.save(stage, [Write(key, 1, b"mine" * 1000) for key in keys], epoch=epoch, batch=5)
    assert caught.value.keys == tuple(stale)
    held = store.load(stage, keys)
    assert all(held[key].value == b"theirs" for key in stale)
    assert {state.version for key, state in held.items() if key not in stale} <= {1, 2}


def test_writers_of_other_states_of_a_bucket_do_not_conflict(opened, keyspace, stage):
    one, other = opened(keyspace, "buckets=1"), opened(keyspace, "buckets=1")
    epoch = begun(one, stage, [b"a", b"b"])
    for version in range(1, 6):
        one.save(stage, [Write(b"a", version, b"x")], epoch=epoch, batch=version)
        other.save(stage, [Write(b"b", version, b"y")], epoch=epoch, batch=version)
    assert {state.version for state in one.load(stage, [b"a", b"b"]).values()} == {6}


@pytest.mark.parametrize("column", ["value", "version", "epoch", "batch_number"])
def test_a_row_without_one_of_its_columns_is_corrupt_and_not_empty(opened, keyspace, session, stage, column):
    store = opened(keyspace, "buckets=8")
    epoch = begun(store, stage)
    session.execute(
        f"DELETE {column} FROM {keyspace}.state "
        "WHERE flow = %s AND generation = 1 AND stage = 'aircraft' AND bucket = %s AND key = %s",
        (stage.flow, bucket_of(b"N14228", 8), b"N14228"),
    )
    for use in (
        lambda: store.load(stage, [b"N14228"]),
        lambda: list(store.scan(stage)),
        # Of another version than the stored one, even if there is none: a writer has always loaded before.
        lambda: store.save(stage, [Write(b"N14228", 2, b"2")], epoch=epoch, batch=4),
    ):
        with pytest.raises(Corrupt, match=r"stage aircraft, key b'N14228'.*Restore"):
            use()


def test_a_whole_row_that_somebody_deletes_is_not_noticed_as_the_operations_page_says(opened, keyspace, session, stage):
    store = opened(keyspace, "buckets=8")
    epoch = begun(store, stage)
    session.execute(
        f"DELETE FROM {keyspace}.state WHERE flow = %s AND generation = 1 AND stage = 'aircraft' AND bucket = %s AND key = %s",
        (stage.flow, bucket_of(b"N14228", 8), b"N14228"),
    )
    assert store.load(stage, [b"N14228"]) == {}
    store.save(stage, [Write(b"N14228", 0, b'{"legs":1}')], epoch=epoch, batch=4)  # begins at nothing


def test_a_manifest_that_was_tampered_with_is_corrupt(opened, keyspace, session, stage):
    store = opened(keyspace)
    epoch = begun(store, stage)
    store.save_manifest(stage.flow_ref, Manifest(epoch=epoch, batch=3))
    session.execute(
        f"UPDATE {keyspace}.flow SET manifest = %s WHERE flow = %s AND generation = 1 IF EXISTS",
        ('{"epoch":1,"batch":99}', stage.flow),
    )
    for use in (
        lambda: store.load_manifest(stage.flow_ref),
        lambda: store.save_manifest(stage.flow_ref, Manifest(epoch=epoch, batch=4)),
    ):
        with pytest.raises(Corrupt, match="manifest"):
            use()


def test_tables_that_are_emptied_under_a_running_flow_stop_it(opened, own_keyspace, session, stage):
    store = opened(own_keyspace, "buckets=2")
    epoch = begun(store, stage)
    for table in ("flow", "state"):
        session.execute(f"TRUNCATE {own_keyspace}.{table}", timeout=60)
    with pytest.raises(Terminal, match="emptied or replaced"):
        store.save(stage, [Write(b"N14228", 1, b"2")], epoch=epoch, batch=4)
    assert list(opened(own_keyspace).scan(stage)) == []


def test_states_that_are_emptied_beside_a_flow_that_is_not_stop_this_run_and_the_next(
    opened, own_keyspace, session, stage
):
    store = opened(own_keyspace, "buckets=2")
    epoch = begun(store, stage)
    session.execute(f"TRUNCATE {own_keyspace}.state", timeout=60)
    with pytest.raises(Terminal, match=r"stage aircraft: bucket \d has been emptied"):
        store.save(stage, [Write(b"N14228", 0, b"2")], epoch=epoch, batch=4)
    with pytest.raises(Terminal, match="has been emptied"):
        opened(own_keyspace).acquire_epoch(stage.flow_ref)


def test_a_run_that_died_while_it_raised_the_fences_is_made_good_by_the_next_install(opened, keyspace, session, stage):
    store = opened(keyspace, "buckets=4")
    old = begun(store, stage, [b"%d" % i for i in range(20)])
    # The state after it dies following its first transaction: the epoch without the fences.
    session.execute(
        f"UPDATE {keyspace}.flow SET epoch = %s WHERE flow = %s AND generation = 1 IF epoch = %s",
        (old + 5, stage.flow, old),
    )
    store.install_epoch(stage.flow_ref, old + 5)
    for key in range(20):
        with pytest.raises(Fenced):
            store.save(stage, [Write(b"%d" % key, 1, b"late")], epoch=old, batch=4)


def test_a_writer_raises_a_fence_that_its_own_run_left_low(opened, keyspace, session, stage):
    store = opened(keyspace, "buckets=4")
    old = begun(store, stage)
    session.execute(
        f"UPDATE {keyspace}.flow SET epoch = %s WHERE flow = %s AND generation = 1 IF epoch = %s",
        (old + 5, stage.flow, old),
    )
    store.save(stage, [Write(b"N14228", 1, b"2")], epoch=old + 5, batch=0)
    with pytest.raises(Fenced):
        store.save(stage, [Write(b"N14228", 2, b"late")], epoch=old, batch=4)


def test_a_healthy_single_node_has_one_finding(cassandra_url, keyspace):
    (finding,) = preflight(f"{cassandra_url}/{keyspace}")
    assert finding.risk == "replication-1"
    assert finding.unsafe
    assert "nodetool repair" in str(finding)


def test_preflight_names_what_costs_states(cassandra_url, own_keyspace, session):
    session.execute(f"ALTER TABLE {own_keyspace}.state WITH default_time_to_live = 3600", timeout=60)
    session.execute(f"ALTER KEYSPACE {own_keyspace} WITH durable_writes = false", timeout=60)
    found = {
        finding.risk: finding
        for finding in preflight(
            f"{cassandra_url}/{own_keyspace}?batch_bytes=60000&max_value_bytes=8388608&dc=datacenter1&mode=timestamp"
        )
    }
    assert found.keys() == {"no-commitlog", "expiring-states", "replication-1", "batch-size", "timestamp-mode"}
    assert all(finding.remedy for finding in found.values())
    assert not found["batch-size"].unsafe


def test_preflight_names_a_datacentre_that_is_not_there(cassandra_url, keyspace):
    with pytest.raises(Terminal, match=r"no data centre.*datacenter1"):
        preflight(f"{cassandra_url}/{keyspace}?dc=nowhere")


def test_a_server_that_syncs_before_it_acknowledges_is_durable(opened, keyspace):
    capabilities = opened(keyspace).capabilities
    assert capabilities.durable
    assert capabilities.fenced
    assert not opened(keyspace, "mode=timestamp").capabilities.fenced


FORKING = """
import os, sys, threading
from persistence.registry import open_store
from persistence.protocol import FlowRef, Write

store = open_store(sys.argv[1])
stage = FlowRef(sys.argv[2]).stage("s")
epoch = store.acquire_epoch(stage.flow_ref)

def write(key, versions):
    for version in versions:
        store.save(stage, [Write(key, version, b"x")], epoch=epoch, batch=version)

busy = threading.Thread(target=write, args=(b"busy", range(60)))
busy.start()
children = []
for number in range(4):
    write(b"parent", [number])
    child = os.fork()
    if not child:
        if number % 2:  # every second one never uses the store, and must also end
            write(b"child%d" % number, range(3))
        sys.exit(0)  # with all that Python runs at its end
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
busy.join()
write(b"parent", [4])
assert {key: state.version for key, state in store.scan(stage)} == {
    b"busy": 60, b"parent": 5, b"child1": 3, b"child3": 3
}
"""


def test_processes_that_fork_in_the_middle_of_their_work_go_on_and_end(cassandra_url, keyspace):
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, f"{cassandra_url}/{keyspace}", f"fork-{uuid.uuid4().hex}"],
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_the_hosts_of_a_url_are_tried_until_one_answers(cassandra_url, keyspace, stage):
    server = urlsplit(cassandra_url)
    store = open_store(f"cassandra://127.0.0.1:1,{server.hostname}:{server.port}/{keyspace}")
    assert store.installed_epoch(stage.flow_ref) == 0
    store.close()

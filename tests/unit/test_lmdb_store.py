import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import lmdb
import pytest

from persistence.errors import Conflict, Corrupt, Terminal, Transient
from persistence.lmdb import environment
from persistence.lmdb.errors import translate
from persistence.lmdb.layout import SHORT
from persistence.murmur2 import parts_of
from persistence.protocol import FlowRef, Manifest, Stored, Write
from persistence.registry import open_store

FLOW = FlowRef("fleet")
STAGE = FLOW.stage("aircraft")
_fork = multiprocessing.get_context("fork")
_spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "directory"


@pytest.fixture
def url(path):
    return f"lmdb://{path}"


@pytest.fixture
def store(url):
    store = open_store(url)
    yield store
    store.close()


def put(store, *keys, value=b'{"legs":1}'):
    epoch = store.acquire_epoch(FLOW)
    store.save(STAGE, [Write(key, 0, value) for key in keys], epoch=epoch, batch=3)
    return epoch


def entries(path):
    """What another program finds there."""
    with lmdb.open(str(path), create=False) as opened, opened.begin() as transaction:
        return dict(transaction.cursor())


def change(path, key, value):
    """What another program does there."""
    with lmdb.open(str(path), create=False) as opened, opened.begin(write=True) as transaction:
        transaction.put(key, value)


def run_in(context, target, *args):
    process = context.Process(target=target, args=args)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize(
    ("sync", "expected"), [("full", (True, True)), ("nometasync", (True, False)), ("nosync", (False, True))]
)
def test_sync_reaches_lmdb(url, sync, expected):
    store = open_store(f"{url}?sync={sync}")
    put(store, b"k")
    flags = store._shards[0]._environment._lmdb.flags()
    assert (flags["sync"], flags["metasync"]) == expected
    store.close()


def test_one_directory_cannot_be_open_with_two_kinds_of_sync_in_one_process(store, url):
    put(store, b"k")
    with pytest.raises(Terminal, match="the same `sync`"):
        open_store(f"{url}?sync=nosync").load(STAGE, [b"k"])
    store.close()
    assert open_store(f"{url}?sync=nosync").load(STAGE, [b"k"])


def test_a_handle_that_is_closed_leaves_the_others_open(store, url):
    put(store, b"k")
    other = open_store(url)
    assert other.load(STAGE, [b"k"])
    opened = store._shards[0]._environment._lmdb
    other.close()
    assert store._shards[0]._environment._lmdb is opened
    store.close()
    assert store._shards[0]._environment._lmdb is None


def test_entries_are_where_the_layout_says(store, path):
    epoch = put(store, b"N14228")
    store.save_manifest(FLOW, Manifest(epoch=epoch, batch=1))
    store.close()
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*.mdb")) == [
        f"{shard}/{file}" for shard in range(4) for file in ("data.mdb", "lock.mdb")
    ]
    for shard in range(1, 4):
        assert entries(path / str(shard)) == {b"headwater": b'{"schema":2,"stages":0}', b"epoch/fleet/1": b"1"}
    found = entries(path / "0")
    assert found.pop(b"manifest/fleet/1").startswith(b"{")
    assert found == {
        b"headwater": b'{"schema":2,"stages":1}',
        b"epoch/fleet/1": b"1",
        b"stage/fleet/1/aircraft": b'{"number":1,"mark":1}',
        b"\0\0\0\1N14228": bytes([0] * 7 + [1] + [0] * 7 + [1] + [0] * 7 + [3]) + b'{"legs":1}',
    }


def test_keys_longer_than_lmdb_allows_are_stored_and_scanned_in_order(store):
    stem = b"k" * (SHORT - 1)
    keys = [stem + end for end in (b"", b"a", b"a\0", b"a" * 40, b"b" * 33, b"b" * 1000, b"c")]
    keys += [b"k" * SHORT + b"%05d" % random.Random(i).randrange(10**5) + b"x" * i for i in range(1500)]
    put(store, *keys)
    assert [key for key, _ in store.scan(STAGE)] == sorted(keys)
    assert store.load(STAGE, keys).keys() == set(keys)
    with pytest.raises(Conflict) as caught:
        store.save(STAGE, [Write(keys[5], 0, b"")], epoch=1, batch=4)
    assert caught.value.keys == (keys[5],)


def test_a_scan_keeps_no_transaction_open_between_pages(store):
    put(store, *[b"%05d" % i for i in range(2500)])
    scan = store.scan(STAGE)
    next(scan)
    assert "(no active readers)" in store._shards[0]._environment._lmdb.readers()
    assert len([*scan]) == 2499


def test_a_save_whose_last_part_conflicts_writes_nothing_in_its_shard_and_all_in_the_others(store):
    keys = [b"%04d" % i for i in range(10_000)]
    *rest, last = [key for key, shard in zip(keys, parts_of(keys, 4), strict=True) if shard == 2]
    epoch = put(store, last, keys[0])
    with pytest.raises(Conflict) as caught:
        store.save(STAGE, [Write(key, 0, b"x") for key in keys], epoch=epoch, batch=4)
    assert caught.value.keys == (keys[0], last)
    assert parts_of([keys[0]], 4) != [2]
    assert {parts_of([key], 4)[0] for key, _ in store.scan(STAGE)} == {0, 1, 2, 3}
    assert not store.load(STAGE, rest)


def test_a_full_map_grows_and_nothing_of_the_save_is_lost(store, monkeypatch):
    monkeypatch.setattr(environment, "MAP_BYTES", 1 << 16)
    keys = [b"%05d" % i for i in range(3000)]
    epoch = put(store, *keys, value=bytes(1000))
    assert sum(one._environment._lmdb.info()["map_size"] for one in store._shards) >= 3_000_000
    assert set(store.load(STAGE, keys).values()) == {Stored(1, epoch, 3, bytes(1000))}
    assert {name: one.mark.count for name, one in store.marks(STAGE).items()} == dict.fromkeys("0123", 1)


def grow(store):
    store.save(STAGE, [Write(b"%05d" % i, 0, bytes(1000)) for i in range(3000)], epoch=1, batch=4)


def test_what_another_process_wrote_beyond_this_map_is_read_and_written(store, monkeypatch):
    monkeypatch.setattr(environment, "MAP_BYTES", 1 << 16)
    epoch = put(store, b"k")
    assert run_in(_fork, grow, store) == 0
    assert len(store.load(STAGE, [b"k", b"00000", b"02999"])) == 3
    assert run_in(_fork, overwrite, store) == 0
    store.save(STAGE, [Write(b"k", 1, b"{}")], epoch=epoch, batch=5)
    assert len([*store.scan(STAGE)]) == 3001


def overwrite(store):
    store.save(STAGE, [Write(b"%05d" % i, 1, bytes(4000)) for i in range(3000)], epoch=1, batch=5)


def test_a_scan_goes_on_while_another_process_makes_the_environment_grow(store, monkeypatch):
    monkeypatch.setattr(environment, "MAP_BYTES", 1 << 16)
    put(store, *[b"a%04d" % i for i in range(1500)], value=b"{}")
    scan = store.scan(STAGE)
    next(scan)
    assert run_in(_fork, grow, store) == 0
    assert len([key for key, _ in scan if key.startswith(b"a")]) == 1499


FILL = """
import resource, sys
from persistence.errors import Terminal
from persistence.protocol import FlowRef, Write
from persistence.registry import open_store
store, flow = open_store(sys.argv[1]), FlowRef("fleet")
stage = flow.stage("aircraft")
epoch = store.acquire_epoch(flow)
store.save(stage, [Write(b"k", 0, b"{}")], epoch=epoch, batch=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    store.save(stage, [Write(b"%d" % i, 0, bytes(3000)) for i in range(2000)], epoch=epoch, batch=2)
except Terminal as error:
    print(error)
assert [key for key, _ in store.scan(stage)] == [b"k"]
store.save(stage, [Write(b"k", 1, b"[]")], epoch=epoch, batch=3)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.save(stage, [Write(b"%d" % i, 0, bytes(3000)) for i in range(2000)], epoch=epoch, batch=4)
print(len(list(store.scan(stage))))
"""


def test_a_disk_that_takes_no_more_is_terminal_and_nothing_of_the_call_is_written(url):
    ran = subprocess.run([sys.executable, "-c", FILL, url], capture_output=True, text=True, check=False)
    refused, count = ran.stdout.splitlines()
    assert "stage aircraft" in refused
    assert "Free space on the disk" in refused  # LMDB reports the partial write as an input/output error
    assert (count, ran.returncode) == ("2001", 0), ran.stderr


def die_within_a_save(url):
    """Killed by itself in the middle of its write transaction."""
    store = open_store(url)

    def die(transaction):
        transaction.put(b"\0\0\0\1k", b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    store._shards[0]._environment.write(store, STAGE, die)


def test_a_writer_killed_within_its_transaction_blocks_nobody_and_leaves_nothing(store, url):
    epoch = put(store, b"k")
    for version in range(1, 4):
        assert run_in(_spawn, die_within_a_save, url) == -signal.SIGKILL
        store.save(STAGE, [Write(b"k", version, b"{}")], epoch=epoch, batch=3 + version)
    assert store.load(STAGE, [b"k"]) == {b"k": Stored(4, epoch, 6, b"{}")}


def die_within_a_load(url):
    store = open_store(url)
    store._shards[0]._environment.read(store, STAGE, lambda transaction: os.kill(os.getpid(), signal.SIGKILL), None)


def test_the_pages_that_a_killed_reader_had_seen_are_used_again(store, url):
    put(store, b"k")
    assert run_in(_spawn, die_within_a_load, url) == -signal.SIGKILL
    assert "(no active readers)" not in store._shards[0]._environment._lmdb.readers()
    store.acquire_epoch(FLOW)
    assert "(no active readers)" in store._shards[0]._environment._lmdb.readers()


def finds_the_state_after_a_fork(store):
    child = os.fork()
    if not child:
        os._exit(0 if store.load(STAGE, [b"k"]) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_waits_until_no_other_thread_is_within_a_transaction(store):
    put(store, b"k")
    begun, end = threading.Event(), threading.Event()

    def slow(transaction):
        begun.set()
        end.wait(60)

    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(store._shards[0]._environment.write, store, STAGE, slow)
        assert begun.wait(60)
        forking = pool.submit(finds_the_state_after_a_fork, store)
        assert not forking.done()
        end.set()
        assert forking.result(60)
        writing.result(60)
    put(store, b"more")


def child_of_a_child(store):
    put(store, b"child")
    assert finds_the_state_after_a_fork(store)


def test_children_and_their_children_open_it_anew_and_the_parents_stays_open(store):
    put(store, b"k")
    parents = store._shards[0]._environment._lmdb
    assert run_in(_fork, child_of_a_child, store) == 0
    assert store._shards[0]._environment._lmdb is parents
    assert store.load(STAGE, [b"child"])


@pytest.mark.parametrize("file", ["data.mdb", "lock.mdb"])
def test_a_file_that_was_replaced_under_a_running_flow_stops_it(store, path, file):
    epoch = put(store, b"k")
    path /= "0"
    (path / "copy").write_bytes((path / file).read_bytes())
    (path / "copy").replace(path / file)
    with pytest.raises(Terminal, match="deleted or replaced while it was open"):
        store.save(STAGE, [Write(b"k", 1, b"")], epoch=epoch, batch=4)


def test_a_directory_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "theirs").write_text("")
    with pytest.raises(Terminal, match=r"other files, for example theirs\. Choose another directory"):
        open_store(f"lmdb://{tmp_path}").acquire_epoch(FLOW)
    assert [file.name for file in tmp_path.iterdir()] == ["theirs"]


def test_a_file_in_place_of_the_directory_is_refused_by_reading_and_by_writing(tmp_path):
    (tmp_path / "states").write_text("theirs")
    store = open_store(f"lmdb://{tmp_path}/states")
    for action in (lambda: store.load(STAGE, [b"k"]), lambda: store.acquire_epoch(FLOW)):
        with pytest.raises(Terminal, match=r"states is not a directory\. Choose another directory"):
            action()


def test_a_path_that_leads_through_a_file_is_no_empty_store(tmp_path):
    (tmp_path / "file").write_text("")
    store = open_store(f"lmdb://{tmp_path}/file/x")
    with pytest.raises(Terminal, match="Not a directory"):
        store.acquire_epoch(FLOW)


@pytest.mark.parametrize(
    ("key", "read"),
    [
        (b"\0\0\0\1k", lambda store: store.load(STAGE, [b"k"])),
        (b"\0\0\0\1k", lambda store: list(store.scan(STAGE))),
        (b"\0\0\0\1k", lambda store: store.save(STAGE, [Write(b"k", 1, b"")], epoch=1, batch=9)),
        (b"epoch/fleet/1", lambda store: store.installed_epoch(FLOW)),
        (b"stage/fleet/1/aircraft", lambda store: store.marks(STAGE)),
        (b"manifest/fleet/1", lambda store: store.load_manifest(FLOW)),
        (b"headwater", lambda store: store.load(STAGE, [b"k"])),
    ],
)
def test_what_somebody_else_wrote_there_is_corrupt_and_names_its_place(store, path, key, read):
    epoch = put(store, b"k")
    store.save_manifest(FLOW, Manifest(epoch=epoch, batch=1))
    store.close()
    change(path / "0", key, b"damaged")
    with pytest.raises(Corrupt) as caught:
        read(store)
    assert caught.value.ref in (FLOW, STAGE)


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (lmdb.CorruptedError, -30796, Corrupt),
        (lmdb.ReadersFullError, -30790, Transient),
        (lmdb.PanicError, -30795, Transient),
        (lmdb.VersionMismatchError, -30794, Terminal),
        (lmdb.TxnFullError, -30788, Terminal),
        (lmdb.DiskError, errno.ENOSPC, Terminal),
        (lmdb.ReadonlyError, errno.EACCES, Terminal),
        (lmdb.Error, errno.EIO, Terminal),
    ],
)
def test_return_codes_become_errors_with_a_remedy(error, code, kind):
    raised = error("what it says")
    raised.code = code
    translated = translate(raised, "states", STAGE)
    assert type(translated) is kind
    assert translated.ref == STAGE
    assert translated.remedy
    assert "See the return codes" not in translated.remedy
    assert "states" in str(translated)

"""Writers of the LMDB store take turns: each comes, and none waits for ever."""

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from unittest import mock

import pytest

from persistence.errors import Terminal, Transient
from persistence.lmdb import turns
from persistence.murmur2 import parts_of
from persistence.protocol import FlowRef, Write
from persistence.registry import open_store

FLOW = FlowRef("fleet")
STAGE = FLOW.stage("aircraft")
_spawn = multiprocessing.get_context("spawn")


@pytest.fixture
def url(tmp_path):
    return f"lmdb://{tmp_path}/states"


@pytest.fixture
def store(url):
    store = open_store(url)
    yield store
    store.close()


def put(store, key):
    epoch = store.acquire_epoch(FLOW)
    store.save(STAGE, [Write(key, 0, b"{}")], epoch=epoch, batch=3)
    return epoch


def stop_in_a_save(url, epoch):
    """Save a state, and stop in the middle of it."""
    store = open_store(url)
    with mock.patch("persistence.lmdb.shard.check_epoch", lambda *_: os.kill(os.getpid(), signal.SIGSTOP)):
        store.save(STAGE, [Write(b"k", 1, b"stopped")], epoch=epoch, batch=4)


def test_a_writer_that_was_stopped_is_named_after_a_bounded_wait_and_may_go_on(store, url, monkeypatch):
    monkeypatch.setattr(turns, "BUSY_SECONDS", 0.2)
    epoch = put(store, b"k")
    other = _spawn.Process(target=stop_in_a_save, args=(url, epoch))
    other.start()
    try:
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(Transient, match=rf"process {other.pid} has been writing .*for 0.2 s.*SIGSTOP"):
            store.save(STAGE, [Write(b"k", 1, b"")], epoch=epoch, batch=4)
        assert store.load(STAGE, [b"k"])[b"k"].version == 1
    finally:
        os.kill(other.pid, signal.SIGCONT)
        other.join()
    assert store.load(STAGE, [b"k"])[b"k"].value == b"stopped"
    store.save(STAGE, [Write(b"k", 2, b"")], epoch=epoch, batch=5)


def save_again_and_again(url, epoch, parent):
    """Save a large state without a pause, until the parent ends or kills this process."""
    store, version, value = open_store(url), 0, bytes(3_000_000)
    while os.getppid() == parent:
        store.save(FLOW.stage("other"), [Write(b"k", version, value)], epoch=epoch, batch=version)
        version += 1


def test_a_writer_comes_about_as_often_as_one_that_does_not_pause(store, url):
    epoch = store.acquire_epoch(FLOW)
    shard = str(parts_of([b"k"], 4)[0])
    other = _spawn.Process(target=save_again_and_again, args=(url, epoch, os.getpid()))
    other.start()
    try:
        while (begin := store.marks(FLOW.stage("other"))[shard].mark.count) < 3:
            assert other.is_alive()
        for version in range(10):
            store.save(STAGE, [Write(b"k", version, b"{}")], epoch=epoch, batch=version)
        assert store.marks(FLOW.stage("other"))[shard].mark.count - begin < 5 * 10
    finally:
        other.kill()
        other.join()


def test_a_store_that_nobody_closes_leaves_no_open_file(url):
    open_files = len(os.listdir("/proc/self/fd"))
    put(open_store(url), b"k")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_process_that_may_open_no_more_files_gets_an_error_that_says_so(store):
    epoch = put(store, b"k")
    os.close(free := os.dup(0))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limit[1]))
    try:
        with pytest.raises(Terminal, match=r"Too many open files .*ulimit -n"):
            store.save(STAGE, [Write(b"k", 1, b"{}")], epoch=epoch, batch=4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    store.save(STAGE, [Write(b"k", 1, b"{}")], epoch=epoch, batch=4)


SAVE = """
import sys
from persistence.lmdb import environment
from persistence.protocol import FlowRef, Write
from persistence.registry import open_store
store, flow, known = open_store(sys.argv[1]), FlowRef("fleet"), environment.turn
epoch = store.acquire_epoch(flow)
writes = [Write(b"%06d" % number, 0, b'{"definition":%d}' % number) for number in range(2000)]
loaded = []

def turn(*args):
    loaded.append("persistence.lmdb.text_kernels" in sys.modules)
    return known(*args)

environment.turn = turn
store.save(flow.stage("aircraft"), writes, epoch=epoch, batch=1)
print(loaded)
"""


def test_compiled_code_is_loaded_before_others_wait(url):
    command = [sys.executable, "-c", SAVE, url]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[True, True, True, True]\n"

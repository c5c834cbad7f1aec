"""The stores in files of their own, SQLite and LMDB: what holds for both beyond the contract."""

import multiprocessing
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
import pytest

from persistence.commit.faults import Injector, use
from persistence.errors import Corrupt, InvalidUrl, Terminal
from persistence.protocol import Capabilities, FlowRef, Stored, Write
from persistence.registry import open_store

FLOW = FlowRef("fleet")
STAGE = FLOW.stage("aircraft")


@dataclass(frozen=True)
class Kind:
    """A kind of store.

    Attributes:
        scheme: Of its URLs.
        noun: What its URLs name.
        states: The file of the states, below that.
        modes: Values of the option that weakens it, by that option's name, the strongest first.
        newer: What the refusal of a newer version says.
        disguise: Makes what is stored at a path another program's ("theirs"), or a newer version's ("newer").
    """

    scheme: str
    noun: str
    states: str
    modes: tuple[str, Sequence[str]]
    newer: str
    disguise: Callable[[Path, str], None]

    def file(self, path: Path) -> Path:
        """The file of the states."""
        return path / self.states if self.states else path


def change_database(path: Path, change: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        connection.execute({"theirs": "CREATE TABLE theirs (x)", "newer": "PRAGMA user_version = 4"}[change])
    connection.close()


def change_environment(path: Path, change: str) -> None:
    path /= "0"
    path.mkdir(parents=True, exist_ok=True)
    key, value = {"theirs": (b"theirs", b"x"), "newer": (b"headwater", b'{"schema":3,"stages":1}')}[change]
    with lmdb.open(str(path)) as opened, opened.begin(write=True) as transaction:
        transaction.put(key, value)


SQLITE = Kind(
    "sqlite", "file", "", ("synchronous", ("full", "normal", "off")), "schema 4; this code reads 3", change_database
)
LMDB = Kind(
    "lmdb",
    "directory",
    "0/data.mdb",
    ("sync", ("full", "nometasync", "nosync")),
    "schema 3; this code reads 2",
    change_environment,
)


@pytest.fixture(params=[SQLITE, LMDB], ids=lambda kind: kind.scheme)
def kind(request):
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "directory" / "states"


@pytest.fixture
def url(kind, path):
    return f"{kind.scheme}://{path}"


@pytest.fixture
def store(url):
    store = open_store(url)
    yield store
    store.close()


def put(store, *keys):
    epoch = store.acquire_epoch(FLOW)
    store.save(STAGE, [Write(key, 0, b'{"legs":1}') for key in keys], epoch=epoch, batch=3)
    return epoch


def test_a_path_may_be_absolute_relative_or_quoted(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option, modes = kind.modes
    for url, place in [
        (f"{kind.scheme}://{tmp_path}/a.db", "a.db"),
        (f"{kind.scheme}://b.db", "b.db"),
        (f"{kind.scheme}://sub/c.db?{option}={modes[1]}", "sub/c.db"),
        (f"{kind.scheme}://with%20space.db", "with space.db"),
    ]:
        open_store(url).acquire_epoch(FLOW)
        assert kind.file(tmp_path / place).is_file()


def test_only_the_strongest_mode_claims_to_survive_a_loss_of_power(kind, url):
    option, modes = kind.modes
    claims = [open_store(f"{url}?{option}={mode}").capabilities for mode in modes]
    assert [one.durable for one in claims] == [True, False, False]
    # The environments of LMDB keep the order of their own writes only.
    assert [one.ordered_durability for one in claims] == [True, kind.scheme == "sqlite", False]
    assert open_store(url).capabilities == claims[0]


def test_it_is_shared_and_scans_in_order_and_sqlite_saves_all_or_nothing(kind, store):
    assert store.capabilities == Capabilities(
        durable=True,
        ordered_durability=True,
        shared=True,
        atomic_save=kind is SQLITE,
        ordered_scan=True,
        marked=True,
        counted=True,
    )


@pytest.mark.parametrize(
    ("scheme", "option"),
    [
        *(("sqlite", option) for option in ("synchronous=maybe", "busy_timeout=-1", "busy_timeout=x", "journal=off")),
        *(("lmdb", option) for option in ("sync=maybe", "map_size=1")),
    ],
)
def test_an_impossible_option_is_refused_without_quoting_it(scheme, option, path):
    with pytest.raises(Terminal) as caught:
        open_store(f"{scheme}://{path}?{option}")
    assert option.split("=")[0] in str(caught.value)
    assert option not in str(caught.value)
    assert "See the store" not in str(caught.value)


def test_a_url_without_a_path_is_refused(kind):
    with pytest.raises(Terminal, match=rf"names no {kind.noun}\. Write {kind.scheme}:///absolute"):
        open_store(f"{kind.scheme}://")


def test_a_save_passes_its_fault_point(store):
    with use(Injector()) as faults:
        put(store, b"k")
    assert list(faults.reached) == ["write:aircraft"]


def test_a_retry_within_a_large_call_is_told_from_a_change(store):
    epoch = put(store, b"0", b"1")
    writes = [Write(b"%d" % i, 0, b'{"legs":1}') for i in range(3000)]
    store.save(STAGE, writes, epoch=epoch, batch=3)
    assert set(store.load(STAGE, [write.key for write in writes]).values()) == {Stored(1, epoch, 3, b'{"legs":1}')}


def test_what_was_deleted_under_a_running_flow_stops_it(kind, store, path):
    epoch = put(store, b"k")
    states = kind.file(path)
    for file in states.parent.iterdir():
        file.unlink()
    states.parent.rmdir()
    for use_it in (
        lambda: store.save(STAGE, [Write(b"k", 1, b"")], epoch=epoch, batch=4),
        lambda: store.load(STAGE, [b"k"]),
    ):
        with pytest.raises(Terminal, match=r"deleted or replaced while it was open\. Start the flow again"):
            use_it()
    assert not states.exists()


def test_an_older_copy_that_was_put_there_between_two_uses_is_not_written_to(kind, store, path):
    store.acquire_epoch(FLOW)
    store.close()
    older = kind.file(path).read_bytes()
    epoch = put(store, b"k")
    store.close()
    kind.file(path).write_bytes(older)
    with pytest.raises(Terminal, match="emptied or replaced"):
        store.save(STAGE, [Write(b"k", 1, b"")], epoch=epoch, batch=4)


def test_reading_what_does_not_exist_finds_nothing_and_creates_nothing(kind, store, tmp_path):
    assert store.installed_epoch(FLOW) == 0
    assert store.load_manifest(FLOW) is None
    assert store.load(STAGE, [b"k"]) == {}
    assert list(store.scan(STAGE)) == []
    assert {name: one.mark.count for name, one in store.marks(STAGE).items()} == dict.fromkeys(
        "0" if kind is SQLITE else "0123", 0
    )
    assert list(tmp_path.iterdir()) == []
    put(store, b"k")
    assert [key for key, _ in store.scan(STAGE)] == [b"k"]


def test_what_belongs_to_another_program_is_left_alone(kind, store, path):
    path.parent.mkdir(parents=True)
    kind.disguise(path, "theirs")
    before = kind.file(path).read_bytes()
    for use_it in (lambda: store.acquire_epoch(FLOW), lambda: store.load(STAGE, [b"k"])):
        with pytest.raises(Terminal, match=rf"another application\. Choose another {kind.noun}"):
            use_it()
    assert kind.file(path).read_bytes() == before


def test_a_newer_version_is_refused(kind, store, path):
    put(store, b"k")
    store.close()
    kind.disguise(path, "newer")
    with pytest.raises(Terminal, match=rf"has {kind.newer}\. Upgrade"):
        store.load(STAGE, [b"k"])


def test_a_file_of_something_else_is_corrupt(kind, store, path):
    kind.file(path).parent.mkdir(parents=True)
    kind.file(path).write_bytes(b"not a database at all " * 500)
    with pytest.raises(Corrupt, match=str(path)) as caught:
        store.installed_epoch(FLOW)
    assert caught.value.ref == FLOW


def create(url):
    open_store(url).acquire_epoch(FLOW)


def test_many_processes_may_create_it_at_once(url):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=create, args=(url,)) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 5
    assert open_store(url).installed_epoch(FLOW) == 5


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///a%00b", "lmdb://", "lmdb:///a%00b"])
def test_a_url_without_a_usable_path_is_invalid(url: str) -> None:
    with pytest.raises(InvalidUrl, match=rf"names no \w+.*Write {url.partition(':')[0]}:///absolute"):
        open_store(url)

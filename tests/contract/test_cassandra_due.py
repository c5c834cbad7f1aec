"""The index of due times in Cassandra: it may say too much, never too little, and states of earlier versions join it."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.sessions import session as windows
from aggregations.definition.source import Json, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from persistence.cassandra import apply_schema, open_store
from persistence.cassandra.driver import connect
from persistence.cassandra.settings import CassandraSettings
from persistence.cassandra.store import CassandraStore
from persistence.contract.base import creating
from persistence.errors import Fenced
from persistence.protocol import StageRef, Write

MODES = ("conditional", "timestamp")


@pytest.fixture(scope="module")
def session(cassandra_url: str) -> Iterator[Any]:
    """A separate connection, to inspect and change the tables."""
    cluster, session = connect(CassandraSettings.parse(f"{cassandra_url}/any"))
    yield session
    cluster.shutdown()


@pytest.fixture
def own_keyspace(cassandra_url: str, session: Any) -> Iterator[str]:
    """A keyspace for one test."""
    name = f"own_{uuid.uuid4().hex}"
    apply_schema(f"{cassandra_url}/{name}?replication=1")
    yield name
    session.execute(f"DROP KEYSPACE {name}", timeout=60)


@pytest.fixture
def opened(cassandra_url: str, own_keyspace: str) -> Iterator[Callable[[str], CassandraStore]]:
    """Opens stores of one bucket, and closes them."""
    stores: list[CassandraStore] = []

    def opening(mode: str = "conditional") -> CassandraStore:
        stores.append(open_store(f"{cassandra_url}/{own_keyspace}?buckets=1&mode={mode}"))
        return stores[-1]

    yield opening
    for store in stores:
        store.close()


def indexed(session: Any, keyspace: str) -> set[tuple[int, bytes]]:
    return {tuple(row) for row in session.execute(f"SELECT due, key FROM {keyspace}.due")}


def due(times: dict[bytes, int], expected: int = 0) -> list[Write]:
    return [Write(key, expected, b"{}", time) for key, time in times.items()]


@pytest.mark.parametrize("mode", MODES)
def test_what_the_index_notes_of_other_times_and_of_no_state_is_not_due(
    opened: Callable[[str], CassandraStore], own_keyspace: str, session: Any, stage: StageRef, mode: str
) -> None:
    store = opened(mode)
    epoch = store.acquire_epoch(stage.flow_ref)
    store.save(stage, due({b"a": 5, b"b": 5, b"c": 9}), epoch=epoch, batch=1)
    store.save(stage, due({b"a": 7}, 1), epoch=epoch, batch=2)
    # As a writer leaves it that dies before it writes the state.
    statement = store._client.live(stage).statements.add_to_index(stage, 0, [(b"none", 4), (b"c", 6)])
    session.execute(statement)
    assert indexed(session, own_keyspace) >= {(4, b"none"), (5, b"a"), (7, b"a"), (6, b"c"), (9, b"c")}
    assert list(store.due(stage, 6)) == [b"b"]
    assert sorted(store.due(stage, 9)) == [b"a", b"b", b"c"]
    assert store.remove(stage, 6, epoch=epoch, batch=2).states == 1
    assert store.load(stage, [b"a", b"b", b"c"]).keys() == {b"a", b"c"}
    assert indexed(session, own_keyspace) == {(7, b"a"), (9, b"c")}
    assert store.remove(stage, 9, epoch=epoch, batch=2).states == 2
    assert indexed(session, own_keyspace) == set()


@pytest.mark.parametrize("mode", MODES)
def test_states_of_an_earlier_version_are_found_and_join_the_index(
    cassandra_url: str,
    opened: Callable[[str], CassandraStore],
    own_keyspace: str,
    session: Any,
    stage: StageRef,
    mode: str,
) -> None:
    store = opened(mode)
    epoch = store.acquire_epoch(stage.flow_ref)
    many = {b"%03d" % number: 5 + number % 2 for number in range(250)}
    store.save(stage, [*due({**many, b"later": 50}), *creating([b"always"])], epoch=epoch, batch=1)
    session.execute(f"DROP TABLE {own_keyspace}.due", timeout=60)
    session.execute(f"ALTER TABLE {own_keyspace}.flow DROP indexed", timeout=60)
    made = apply_schema(f"{cassandra_url}/{own_keyspace}?replication=1")
    assert made == [f"table {own_keyspace}.due", f"column {own_keyspace}.flow.indexed"]

    newer = opened(mode)
    assert sorted(newer.due(stage, 5)) == sorted(many)[::2]
    after = newer.acquire_epoch(stage.flow_ref)
    with pytest.raises(Fenced):
        newer.remove(stage, 5, epoch=epoch, batch=1)
    assert indexed(session, own_keyspace) == set()
    epoch = after
    assert newer.remove(stage, 5, epoch=epoch, batch=1).states == 125
    assert indexed(session, own_keyspace) == {(6, key) for key in sorted(many)[1::2]} | {(50, b"later")}
    newer.save(stage, due({b"new": 6}), epoch=epoch, batch=2)
    assert newer.remove(stage, 6, epoch=epoch, batch=2).states == 126
    assert {key for key, _ in newer.scan(stage)} == {b"always", b"later"}


def test_a_stage_of_this_version_reads_no_keys_that_are_not_due(
    opened: Callable[[str], CassandraStore], stage: StageRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened("conditional")
    epoch = store.acquire_epoch(stage.flow_ref)
    store.save(stage, due({b"a": 5, b"b": 7}), epoch=epoch, batch=1)
    monkeypatch.setattr(type(store._states), "_every_due", None)
    assert list(store.due(stage, 5)) == [b"a"]
    assert store.remove(stage, 5, epoch=epoch, batch=1).states == 1


@pytest.mark.parametrize("times", [{"expire_after": "20m"}, {"window": windows("4m", retention="8m")}])
def test_a_key_that_is_always_active_has_few_rows_in_the_index(
    cassandra_url: str, own_keyspace: str, session: Any, times: Any
) -> None:
    topic = Topic("stops", Json({"at": int}), envelope=False, time="at")
    flow = Flow("stops").source(topic).aggregate("bus", "_key", Fields(stops=count()), **times)
    runner = MemoryRunner(flow, bind(flow, {}, f"{cassandra_url}/{own_keyspace}?buckets=1"))
    for offset in range(60):
        at_ms = 1_764_000_000_000 + offset * 10_000
        runner.process([Record("stops", 0, offset, b"b", b'{"at": %d}' % at_ms, at_ms)])
    runner.close()
    assert 1 <= len(indexed(session, own_keyspace)) <= 12

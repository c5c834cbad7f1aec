"""Tasks that one call runs side by side: how it ends when some of them fail."""

import threading

import pytest

from persistence.cassandra import apply_schema, open_store
from persistence.errors import Conflict, Fenced, StoreError
from persistence.names import FlowRef

STAGE = FlowRef("together").stage("aircraft")


@pytest.fixture
def client(cassandra_url, worker_id):
    url = f"{cassandra_url}/together_{worker_id}?replication=1"
    apply_schema(url)
    store = open_store(url)
    yield store._client
    store.close()


@pytest.mark.parametrize("order", [1, -1])
def test_a_call_ends_in_the_gravest_of_its_failures(client, order):
    both = threading.Barrier(2)

    def fail(error: StoreError) -> None:
        both.wait(30)
        raise error

    errors = [Conflict((b"N1",), ref=STAGE), Fenced.by(STAGE, 1, 2)][::order]
    with pytest.raises(Fenced):
        client.together(STAGE, [lambda error=error: fail(error) for error in errors])


def test_a_call_that_fails_does_not_return_while_one_of_its_tasks_runs(client):
    runs, failed, ends = threading.Event(), threading.Event(), threading.Event()
    done = []

    def slow() -> None:
        runs.set()
        assert ends.wait(30)
        done.append("slow")

    def fail() -> None:
        assert runs.wait(30)
        failed.set()
        raise Conflict((b"N1",), ref=STAGE)

    def call() -> None:
        with pytest.raises(Conflict):
            client.together(STAGE, [slow, fail])
        done.append("call")

    caller = threading.Thread(target=call)
    caller.start()
    assert failed.wait(30)
    caller.join(0.5)
    assert caller.is_alive()
    ends.set()
    caller.join(30)
    assert done == ["slow", "call"]

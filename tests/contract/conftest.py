"""What the tests of several stores share."""

import uuid

import pytest

from persistence.protocol import FlowRef
from persistence.redis import open_store
from tests.support.redis_server import DURABLE, server


@pytest.fixture(scope="module")
def valkey():
    """A durable server for the tests of one module."""
    with server(*DURABLE) as running:
        yield running


@pytest.fixture
def direct(valkey):
    """A store on that server."""
    store = open_store(f"{valkey.url}?buckets=4")
    yield store
    store.close()


@pytest.fixture
def stage():
    """A stage of a flow that nobody has used."""
    return FlowRef(f"fleet-{uuid.uuid4().hex}").stage("aircraft")


@pytest.fixture
def marker():
    """Bytes that only one write carries."""
    return uuid.uuid4().hex.encode()

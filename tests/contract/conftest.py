"""Fixtures for the tests of several stores."""

import uuid
from urllib.parse import urlsplit

import pytest

from persistence.protocol import FlowRef
from persistence.registry import apply_schema, open_store
from tests.support.proxy import Proxy
from tests.support.redis_server import DURABLE, server


@pytest.fixture(scope="module")
def valkey():
    """A durable server for the tests of one module."""
    with server(*DURABLE) as running:
        yield running


@pytest.fixture(scope="session")
def keyspace(cassandra_url, worker_id):
    """A keyspace for tests that use their own flows and do not disturb others."""
    name = f"shared_{worker_id}"
    apply_schema(f"{cassandra_url}/{name}?replication=1")
    return name


@pytest.fixture
def redis_store_url(valkey):
    return f"{valkey.url}?buckets=4"


@pytest.fixture
def cassandra_store_url(cassandra_url, keyspace):
    return f"{cassandra_url}/{keyspace}?buckets=4"


@pytest.fixture
def server_url(redis_store_url):
    """URL of a store on the server under test: Redis, unless the module overrides it."""
    return redis_store_url


@pytest.fixture
def direct(server_url):
    """A store on that server."""
    store = open_store(server_url)
    yield store
    store.close()


@pytest.fixture
def proxy(server_url):
    """A proxy of that server that breaks connections."""
    server = urlsplit(server_url)
    proxy = Proxy((server.hostname, server.port))
    yield proxy
    proxy.close()


@pytest.fixture
def url(server_url, proxy):
    """URL of the same store through the proxy."""
    return urlsplit(server_url)._replace(netloc=f"127.0.0.1:{proxy.port}").geturl()


@pytest.fixture
def store(url):
    """The same store through the proxy."""
    store = open_store(url)
    yield store
    store.close()


@pytest.fixture
def stage():
    """A stage of a new flow."""
    return FlowRef(f"fleet-{uuid.uuid4().hex}").stage("aircraft")


@pytest.fixture
def marker():
    """Bytes that only one write contains."""
    return uuid.uuid4().hex.encode()

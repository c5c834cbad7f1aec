import pytest

from persistence.cassandra import apply_schema
from persistence.contract import StoreContract


@pytest.fixture(scope="session")
def keyspace_url(cassandra_url, worker_id):
    url = f"{cassandra_url}/contract_{worker_id}?replication=1&buckets=8"
    apply_schema(url)
    return url


class TestCassandra(StoreContract):
    increments = 50
    model_examples = 8

    @pytest.fixture
    def store_url(self, keyspace_url):
        return keyspace_url


class TestCassandraWithTimestamps(StoreContract):
    """The mode without transactions. The suite skips the capabilities that it does not declare."""

    model_examples = 6

    @pytest.fixture
    def store_url(self, keyspace_url):
        return f"{keyspace_url}&mode=timestamp"

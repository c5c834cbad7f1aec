import pytest

from persistence.contract import StoreContract

pytestmark = pytest.mark.integration


class TestRedis(StoreContract):
    increments = 300
    model_examples = 30

    @pytest.fixture
    def store_url(self, redis_url):
        return redis_url

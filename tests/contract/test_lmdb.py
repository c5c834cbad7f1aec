import pytest

from persistence.contract import StoreContract


class TestLmdb(StoreContract):
    increments = 300
    model_examples = 30

    @pytest.fixture
    def store_url(self, tmp_path):
        return f"lmdb://{tmp_path}/states"

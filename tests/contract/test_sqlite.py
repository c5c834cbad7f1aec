import pytest

from persistence.contract import StoreContract


class TestSqlite(StoreContract):
    @pytest.fixture
    def store_url(self, tmp_path):
        return f"sqlite://{tmp_path}/states.db"

import uuid

import pytest

from persistence.contract import StoreContract


class TestMemory(StoreContract):
    @pytest.fixture
    def store_url(self):
        return f"memory://{uuid.uuid4().hex}"

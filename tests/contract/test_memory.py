import uuid

import pytest

from persistence.contract import StoreContract
from persistence.protocol import Write


class TestMemory(StoreContract):
    @pytest.fixture
    def store_url(self):
        return f"memory://{uuid.uuid4().hex}"

    def test_its_bucket_has_the_same_name_before_and_after_a_save(self, store, stage, epoch):
        [name] = store.marks(stage)
        assert [*store.save(stage, [Write(b"a", 0, b"1")], epoch=epoch, batch=1)] == [name]
        assert [*store.marks(stage)] == [name]

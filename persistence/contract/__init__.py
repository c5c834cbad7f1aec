"""Tests of stores: a pytest class with tests for every rule of `StateStore`'s contract.

To test your own store, subclass it and provide the URL of a store:

```python
# tests/test_my_store.py
import pytest
from persistence.contract import StoreContract


class TestMyStore(StoreContract):
    @pytest.fixture
    def store_url(self, tmp_path):
        return f"mine://{tmp_path}/states"
```

`persistence.registry.open_store` must know the scheme, also in other processes: register it in the
entry point group `headwater.stores` of your distribution, or set `opener` to a function that can be imported:

```python
class TestMyStore(StoreContract):
    opener = staticmethod(my_package.open_store)
```

Several tests may share one store: each uses a flow with its own name. Tests of capabilities that the store
does not declare (`capabilities`) are skipped; no test is skipped by the name of a store. Needs pytest and hypothesis.
"""

from persistence.contract.dropping import DropContract
from persistence.contract.epochs import EpochContract
from persistence.contract.manifests import ManifestContract
from persistence.contract.marks import MarkContract
from persistence.contract.model import ModelContract
from persistence.contract.pointer import PointerContract
from persistence.contract.processes import ProcessContract
from persistence.contract.removal import RemovalContract
from persistence.contract.states import StateContract

__all__ = ["StoreContract"]


# pytest runs the tests of the last base class first: simple tests before races and random histories.
class StoreContract(
    ModelContract,
    ProcessContract,
    PointerContract,
    DropContract,
    RemovalContract,
    MarkContract,
    ManifestContract,
    StateContract,
    EpochContract,
):
    """Tests of the whole contract of a store. Subclass it, define the fixture `store_url`, and run pytest.

    Attributes:
        opener: Opens a store by URL. It is called in other processes too, so it must be importable.
        increments: Number of times that each of two writers increments the same states.
        model_examples: Number of random histories that are compared with a dictionary.
    """

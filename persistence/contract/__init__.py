"""The judge of stores: a pytest class with a test for every sentence of `StateStore`'s contract.

A store of your own is judged by subclassing it and saying where a store is:

```python
# tests/test_my_store.py
import pytest
from persistence.contract import StoreContract


class TestMyStore(StoreContract):
    @pytest.fixture
    def store_url(self, tmp_path):
        return f"mine://{tmp_path}/states"
```

The scheme must be known to `persistence.registry.open_store`, also in other processes: name it in the
entry point group `headwater.stores` of your distribution, or set `opener` to a function that can be imported:

```python
class TestMyStore(StoreContract):
    opener = staticmethod(my_package.open_store)
```

Several tests may share one store: each uses a flow with a name of its own. What a store says it
cannot do (`capabilities`) is skipped; nothing is skipped by the name of a store. Needs pytest and hypothesis.
"""

from persistence.contract.epochs import EpochContract
from persistence.contract.manifests import ManifestContract
from persistence.contract.marks import MarkContract
from persistence.contract.model import ModelContract
from persistence.contract.processes import ProcessContract
from persistence.contract.states import StateContract

__all__ = ["StoreContract"]


# pytest runs the tests of the last base first: simple ones before races and random histories.
class StoreContract(ModelContract, ProcessContract, MarkContract, ManifestContract, StateContract, EpochContract):
    """Everything a store promises. Subclass it, define the fixture `store_url`, and run pytest.

    Attributes:
        opener: Opens a store by URL. Called in other processes too, so it must be importable.
        increments: How often each of two writers increments the same states.
        model_examples: How many random histories are compared with a dictionary.
    """

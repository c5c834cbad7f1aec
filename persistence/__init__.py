"""State storage: the store contract, state records, stores and the order of the commit.

Importing this package imports nothing else: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING, Final

from persistence.lazy import lazy

if TYPE_CHECKING:
    from persistence.errors import Conflict, Corrupt, Fenced, StoreError, StoreWentBack, Terminal, Transient
    from persistence.protocol import Capabilities, FlowRef, Manifest, Removed, StageRef, StateStore, Stored, Write
    from persistence.reader import Reader, SequenceSnapshots
    from persistence.registry import open_store
    from persistence.stored_filter import Filtered, StoredFilter, filter_states

__all__ = [
    "Capabilities",
    "Conflict",
    "Corrupt",
    "Fenced",
    "Filtered",
    "FlowRef",
    "Manifest",
    "Reader",
    "Removed",
    "SequenceSnapshots",
    "StageRef",
    "StateStore",
    "StoreError",
    "StoreWentBack",
    "Stored",
    "StoredFilter",
    "Terminal",
    "Transient",
    "Write",
    "filter_states",
    "open_store",
]

_MODULES: Final = {
    "errors": ("Conflict", "Corrupt", "Fenced", "StoreError", "StoreWentBack", "Terminal", "Transient"),
    "protocol": ("Capabilities", "FlowRef", "Manifest", "Removed", "StageRef", "StateStore", "Stored", "Write"),
    "reader": ("Reader", "SequenceSnapshots"),
    "registry": ("open_store",),
    "stored_filter": ("Filtered", "StoredFilter", "filter_states"),
}

__getattr__, __dir__ = lazy(__name__, _MODULES)

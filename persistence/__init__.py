"""State storage: the store contract, state records, stores and the order of the commit.

Importing this package imports nothing else: a name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from persistence.errors import Conflict, Corrupt, Fenced, StoreError, StoreWentBack, Terminal, Transient
    from persistence.protocol import Capabilities, FlowRef, Manifest, StageRef, StateStore, Stored, Write
    from persistence.registry import open_store

__all__ = [
    "Capabilities",
    "Conflict",
    "Corrupt",
    "Fenced",
    "FlowRef",
    "Manifest",
    "StageRef",
    "StateStore",
    "StoreError",
    "StoreWentBack",
    "Stored",
    "Terminal",
    "Transient",
    "Write",
    "open_store",
]

_MODULES: Final = {
    "errors": ("Conflict", "Corrupt", "Fenced", "StoreError", "StoreWentBack", "Terminal", "Transient"),
    "protocol": ("Capabilities", "FlowRef", "Manifest", "StageRef", "StateStore", "Stored", "Write"),
    "registry": ("open_store",),
}
_MODULE_OF: Final = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

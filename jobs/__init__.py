"""What a person runs: the command line, the local stack, jobs and their settings.

Importing this package imports nothing else: a name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jobs.settings import kafka
    from jobs.submit import run
    from jobs.views import View, states

__all__ = ["View", "kafka", "run", "states"]

_MODULE_OF: Final = {"View": "jobs.views", "kafka": "jobs.settings", "run": "jobs.submit", "states": "jobs.views"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

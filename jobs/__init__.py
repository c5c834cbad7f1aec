"""What a person runs: the command line, the local stack, jobs and their settings.

Importing this package imports nothing else: a name is imported when it is first used, and Spark only for
`StatesSource`.
"""

from typing import TYPE_CHECKING, Final

from persistence.lazy import lazy

if TYPE_CHECKING:
    from jobs.settings import kafka
    from jobs.submit import run
    from jobs.table.source import StatesSource
    from jobs.views import States, View, states

__all__ = ["States", "StatesSource", "View", "kafka", "run", "states"]

_MODULES: Final = {
    "settings": ("kafka",),
    "submit": ("run",),
    "table.source": ("StatesSource",),
    "views": ("States", "View", "states"),
}

__getattr__, __dir__ = lazy(__name__, _MODULES)

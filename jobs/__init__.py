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
    from jobs.tracing import Found, Place, Step, trace
    from jobs.views import States, View, states

__all__ = ["Found", "Place", "States", "StatesSource", "Step", "View", "kafka", "run", "states", "trace"]

_MODULES: Final = {
    "settings": ("kafka",),
    "submit": ("run",),
    "table.source": ("StatesSource",),
    "tracing": ("Found", "Place", "Step", "trace"),
    "views": ("States", "View", "states"),
}

__getattr__, __dir__ = lazy(__name__, _MODULES)

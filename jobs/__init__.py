"""What a person runs: the command line, the local stack, jobs and their settings.

Importing this package imports nothing else: a name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from persistence.lazy import lazy

if TYPE_CHECKING:
    from jobs.settings import kafka
    from jobs.submit import run
    from jobs.views import View, states

__all__ = ["View", "kafka", "run", "states"]

__getattr__, __dir__ = lazy(__name__, {"settings": ["kafka"], "submit": ["run"], "views": ["View", "states"]})

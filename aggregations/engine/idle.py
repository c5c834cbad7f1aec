"""What a process lets go of while it waits for its next task."""

from collections.abc import Callable
from typing import Final

keepers: Final[list[Callable[[], bool]]] = []
"""Called in a resident about once a second between two calls. Each lets go of what is no longer used, and returns whether
it keeps something that a later call needs: the resident is not idle then."""

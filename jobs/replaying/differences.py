"""The differences between two generations of a flow."""

from typing import Any

from aggregations.definition.flow import Flow
from jobs.comparing import Comparison
from jobs.replaying.generations import Generations


def differences(found: Generations, old: int, new: int, *, sample: int, against: Flow[Any] | None = None) -> Comparison:
    raise NotImplementedError

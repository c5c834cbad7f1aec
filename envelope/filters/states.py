"""A filter with its states in memory."""

from collections.abc import Mapping
from typing import Any

from envelope.errors import EnvelopeError
from envelope.filters.arrival import UNIDENTIFIED, Filter, Ruling, rejected


class FilterStates:
    """Judges records with a filter and keeps a state for each scope.

    Args:
        rule: The filter.
        states: States by scope, as `dump` returns them.
    """

    def __init__(self, rule: Filter[Any], states: Mapping[bytes, Any] | None = None) -> None:
        self.filter = rule
        self._states: dict[bytes, Any] = {}
        for scope, value in (states or {}).items():
            self.put(scope, value)

    def judge(self, arrival: Any) -> Ruling:
        """Decide about the next record."""
        try:
            scope = self.filter.scope(arrival)
        except EnvelopeError as error:
            return rejected(error)
        return UNIDENTIFIED if scope is None else self.judge_in(scope, arrival)

    def judge_in(self, scope: bytes, arrival: Any) -> Ruling:
        """Decide about the next record of a scope."""
        ruling, self._states[scope] = self.filter.judge(self.state(scope), arrival)
        return ruling

    def passes(self, arrival: Any) -> bool:
        """Whether the next record is passed on now."""
        return self.judge(arrival).forward

    def state(self, scope: bytes) -> Any:
        """The state of a scope."""
        state = self._states.get(scope)
        return self.filter.zero() if state is None else state

    def put(self, scope: bytes, value: Any) -> None:
        """Set the state of a scope to what `dump` returned."""
        self._states[scope] = self.filter.load(value)

    def __contains__(self, scope: bytes) -> bool:
        return scope in self._states

    def dump(self) -> dict[bytes, Any]:
        """All states as JSON values, by scope."""
        return {scope: self.dump_of(scope) for scope in self._states}

    def dump_of(self, scope: bytes) -> Any:
        """The state of a scope as a JSON value."""
        return self.filter.dump(self.state(scope))

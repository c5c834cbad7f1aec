"""A world of sessions that are published when they close: partitions fall silent and return, and everything crashes.

A published session never changes: no element joins it, or connects it with another one. None leaves before it is
published. What a stage behind the sessions counted is what they hold, or held when they were published.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from aggregations.definition.sessions import SessionWindow, session
from aggregations.run import final
from aggregations.run.memory import MemoryRunner
from aggregations.run.snapshots import Snapshot
from tests.simulation.final import BUGS as FINAL_BUGS
from tests.simulation.final import FinalWorld
from tests.simulation.oracle import Violation
from tests.simulation.patch import Patch

MICROS = 1_000_000


class FinalSessionWorld(FinalWorld):
    """One world, drawn from a seed."""

    windows = (  # type: ignore[assignment]
        session("2m"),
        session("3m", lateness="2m", retention="0s"),
        session("4m", retention="0s"),
        session("1m", retention="4m"),
    )

    def _unchanged(self, known: Snapshot, repeated: Snapshot) -> bool:
        return bool(known.state == repeated.state)  # its key may have been written for another session since

    def _check(self, runner: MemoryRunner, *, ended: bool) -> None:
        found = runner.results("attempts")
        self._check_published(found)
        closing_us = runner.run.manifest.closing_us if runner.run.manifest else None
        closed = None if closing_us is None else self._window.closed_until(closing_us)
        for key in found.keys() - self._final.keys():
            start_us, end_us = self._span(key)
            if closed is not None and SessionWindow.due(end_us) <= closed:
                raise Violation(f"{key!r} has closed and was not published")
            for other in self._final:
                begin, end = self._span(other)
                near = start_us <= end + self._gap_us and begin <= end_us + self._gap_us
                if near and self._part(other) == self._part(key):
                    raise Violation(f"{other!r} was published, and became a part of {key!r}")
        if ended:
            self._check_counts(runner, found)

    def _check_counts(self, runner: MemoryRunner, found: Mapping[bytes, Any]) -> None:
        """Compare the sessions with the logs, and with what the stage behind them counted."""
        held: Counter[bytes] = Counter()
        for key, state in {**{key: one.state for key, one in self._final.items()}, **found}.items():
            held[self._part(key)] += state["n"]
        if {key: one["n"] for key, one in runner.results("all").items()} != dict(held):
            raise Violation("an element was lost, or counted twice, behind a session")
        events = Counter(one.part.encode() for log in self._log for one in set(log))
        if any(held[part] > events[part] for part in held):
            raise Violation("an element is in two sessions")
        self.late += (events - held).total()

    @property
    def _gap_us(self) -> int:
        return int(self._window.gap) * MICROS  # type: ignore[attr-defined]

    def _span(self, key: bytes) -> tuple[int, int]:
        window = self._window.split(key)
        return round(window.start.timestamp() * MICROS), round(window.end.timestamp() * MICROS)

    def _part(self, key: bytes) -> bytes:
        return self._window.split(key).key


BUGS: Mapping[str, Sequence[Patch]] = {
    **{f"{bug}-of-sessions": FINAL_BUGS[bug] for bug in ("published-windows-open", "published-is-not-noted")},
    "sessions-removed-before-published": FINAL_BUGS["removed-before-published"],
    "published-before-its-last-element": [
        (SessionWindow, "changes", property(lambda self: self.gap + self.lateness)),
    ],
    "earlier-sessions-of-a-key-are-skipped": [(final, "_EVER", 0)],
}
"""Bugs that are planted on purpose: the patches that make them."""

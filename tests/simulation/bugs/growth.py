"""Bugs of what happens when partitions are added to the topic that the flow reads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.run import growth, run
from aggregations.run.plan import Plan, plan
from jobs.republish import growth_watch
from jobs.republish.growth import Note, Readable, judge
from tests.simulation import driver
from tests.simulation.patch import Patch

_advance = growth.advance


def _forgets(*arguments: Any, **options: Any) -> Plan:
    return replace(plan(*arguments, **options), growth=None)


def _ends_at_once(*arguments: Any, **options: Any) -> Any:
    return _advance(*arguments, **{**options, "max_age_ms": 0})


def _never_seen(*arguments: Any, **options: Any) -> Any:
    return _advance(*arguments, **{**options, "now": 0, "shared": False})


def _all_at_once(places: Any, now: int, **options: Any) -> Readable:
    return Readable(now)


def _one_end_is_enough(places: Any, now: int, **options: Any) -> Readable:
    verdict = judge(places, now, **options)
    return Readable(now) if any(place.note.until is not None for place in places.values()) else verdict


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "growth-evicts": (
        "states evict positions although partitions were added before the topic was read",
        [(run.Run, "evicts", property(lambda self: True))],
    ),
    "growth-forgotten": ("a run that begins forgets that the topic has grown", [(driver, "plan", _forgets)]),
    "growth-ends-early": (
        "the ends are taken while producers do not know of the new partitions",
        [(run, "advance", _ends_at_once)],
    ),
    "service-reads-new-partitions-at-once": (
        "a republisher reads partitions that were added before what stands in the old ones",
        [(growth_watch, "judge", _all_at_once)],
    ),
    "service-trusts-one-end": (
        "a republisher reads new partitions when the end of one old partition is known",
        [(growth_watch, "judge", _one_end_is_enough)],
    ),
    "service-forgets-growth": (
        "a republisher does not commit that its topic has grown",
        [(Note, "__str__", lambda self: f"{self.topic_id} {max(self.resolved, self.now)}")],
    ),
    "growth-unseen": ("a run does not notice partitions that are added to its topic", [(run, "advance", _never_seen)]),
}

"""Bugs of what happens when partitions are added to the topic that the flow reads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations import growth, run
from aggregations.reconcile import Plan, plan
from jobs.simulation import driver
from jobs.simulation.patch import Patch

_advance = growth.advance


def _forgets(*arguments: Any) -> Plan:
    return replace(plan(*arguments), growth=None)


def _ends_at_once(*arguments: Any, **options: Any) -> Any:
    return _advance(*arguments, **{**options, "max_age_ms": 0})


def _never_seen(*arguments: Any, **options: Any) -> Any:
    return _advance(*arguments, **{**options, "now": 0, "shared": False})


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
    "growth-unseen": ("a run does not notice partitions that are added to its topic", [(run, "advance", _never_seen)]),
}

"""Bugs of what notices that a store went back: losses that are missed, and alarms without a loss."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aggregations.run import begin
from aggregations.run.consistency import check_marks
from persistence import marks
from persistence import memory as memory_store
from persistence.marks import KnownMarks, Mark
from tests.simulation.patch import Patch


def _without_manifests(flow: str, manifests: Any, *rest: Any) -> Any:
    known = [(name, one and msgspec.structs.replace(one, marks={})) for name, one in manifests]
    return check_marks(flow, known, *rest)


def _nothing_downstream(self: KnownMarks, stage: str) -> Mapping[str, Any]:
    return {}


def _only_equal(self: Mark, other: Mark) -> bool:
    return self.count == other.count


def _any(*arguments: Any) -> None:
    """Lets everything pass."""


def _of_one_life(self: Mark, other: Mark) -> bool:
    return self.life == other.life and self.count >= other.count


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "marks-not-compared": (
        "a start does not ask whether parts of stores went back",
        [(begin, "check_marks", lambda *_: [])],
    ),
    "marks-of-manifests-forgotten": (
        "a start compares only what buckets upstream say of those downstream",
        [(begin, "check_marks", _without_manifests)],
    ),
    "marks-not-kept-upstream": (
        "states do not say what was acknowledged downstream of them",
        [(KnownMarks, "downstream", _nothing_downstream)],
    ),
    "marks-not-compared-in-saves": (
        "a save does not ask whether its bucket went back",
        [(memory_store, "check_held", _any), (marks, "check_held", _any)],
    ),
    "ahead-is-a-loss": ("a bucket that is ahead is taken for one that went back", [(Mark, "holds", _only_equal)]),
    "restart-is-a-loss": ("another life of a server is taken for a loss", [(Mark, "holds", _of_one_life)]),
}

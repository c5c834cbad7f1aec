"""Bugs that are planted on purpose, by area."""

from collections.abc import Callable, Mapping, Sequence

from tests.simulation.bugs import (
    commit,
    filters,
    growth,
    letters,
    mends,
    processes,
    rebuilds,
    routes,
    rule,
    sources,
    stages,
    stores,
)
from tests.simulation.functions import OUT
from tests.simulation.patch import Patch
from tests.simulation.topology import Spec

BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    **rule.BUGS,
    **stages.BUGS,
    **commit.BUGS,
    **filters.BUGS,
    **growth.BUGS,
    **letters.BUGS,
    **mends.BUGS,
    **processes.BUGS,
    **rebuilds.BUGS,
    **routes.BUGS,
    **sources.BUGS,
    **stores.BUGS,
}
"""Name to what is wrong, and the patches that make it so."""

MATTERS: Mapping[str, Callable[[Spec], bool]] = {
    **{name: lambda spec: bool(spec.processors) for name in BUGS if name.startswith("service-")},
    **dict.fromkeys(growth.BUGS, lambda spec: spec.growth == "lagging"),
    **filters.MATTERS,
    **dict.fromkeys(mends.BUGS, lambda spec: spec.repairs),
    **dict.fromkeys(rebuilds.BUGS, lambda spec: spec.rebuilds),
    "rebuild-points-in-one-store": lambda spec: spec.rebuilds and spec.split < len(spec.stages),
    "rebuild-holds-no-outputs": lambda spec: spec.rebuilds and spec.publishes,
    "rebuild-keeps-sent-outputs": lambda spec: spec.rebuilds and spec.publishes,
    **dict.fromkeys(sources.BUGS, lambda spec: spec.second),
    "relay-is-known-by-one-source": lambda spec: spec.second and not spec.folds,
    "outputs-not-marked": lambda spec: spec.audit == OUT,
    "outputs-before-a-stage-not-listed": lambda spec: bool(spec.publishes_before),
    "struck-although-rejected-again": lambda spec: not spec.folds,
    "branch-fails-alone": lambda spec: spec.aside and any(stage.fails == "filter" for stage in spec.stages),
    "marks-not-kept-upstream": lambda spec: spec.split < len(spec.stages),
    **dict.fromkeys(("session-joins-one", "merge-forgets-positions"), lambda spec: spec.sessions),
    "partial-flat-map": lambda spec: any(stage.flat for stage in spec.stages),
    "service-gives-no-key": lambda spec: spec.keyless and bool(spec.processors),
    "lane-without-topic-id": lambda spec: spec.recreates,
    "divert-takes-the-record": lambda spec: any(stage.fails == "divert" for stage in spec.stages),
    **dict.fromkeys(("siblings-split", "event-id-ignored"), lambda spec: any(one.foreign for one in spec.processors)),
    "keyless-narrow": lambda spec: spec.keyless or any(one.spread for one in spec.processors),
    "letters-taken-for-envelopes": lambda spec: spec.revives and any(one.raw for one in spec.processors),
    **dict.fromkeys(
        ("service-checks-ids-first", "service-follows-any-topic", "service-sends-before-the-check"),
        lambda spec: bool(spec.processors) and spec.recreates,
    ),
    "service-leaves-gaps": lambda spec: bool(spec.processors) and spec.history in (1, 2) and not spec.growth,
}
"""Worlds that a bug can be seen in at all; it is not looked for in others. Any world for those that are missing."""

BEGINS: Mapping[str, int] = {"service-filter-overwrites": 1_300}
"""Seeds with which the search for rare bugs begins. Before this one, 250 worlds do not show it."""

"""Bugs that are planted on purpose, by what they are bugs of."""

from collections.abc import Mapping, Sequence

from jobs.simulation.bugs import commit, growth, processes, routes, rule, stages, stores
from jobs.simulation.patch import Patch

BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    **rule.BUGS,
    **stages.BUGS,
    **commit.BUGS,
    **growth.BUGS,
    **processes.BUGS,
    **routes.BUGS,
    **stores.BUGS,
}
"""Name to what is wrong, and the patches that make it so."""

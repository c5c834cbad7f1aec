"""What a person runs: the command line, the local stack, jobs and their settings.

Importing this package imports nothing else: a name is imported when it is first used, and Spark only for
`StatesSource`.
"""

from typing import TYPE_CHECKING, Final

from persistence.lazy import lazy

if TYPE_CHECKING:
    from jobs.backup import Restored, Snapshot, restore, snapshot
    from jobs.dead_letters.discard import Discarded, discard
    from jobs.dead_letters.letters import Handled, Selection
    from jobs.dead_letters.redrive import redrive
    from jobs.explaining.blame import Blame, blame
    from jobs.explaining.explain import explain
    from jobs.explaining.outcome import Explanation, Fate, Outcome
    from jobs.mending import Mended, mend
    from jobs.refolding.audit import Audit, audit
    from jobs.refolding.rehearse import Rehearsal, rehearse
    from jobs.replay import (
        Differences,
        Replayed,
        ReplayPlan,
        Swapped,
        abandon,
        drop,
        plan_replay,
        pointer_of,
        rebuild,
        rollback,
        swap,
    )
    from jobs.settings import kafka
    from jobs.submit import run
    from jobs.submit.command import submit_line
    from jobs.table.source import StatesSource
    from jobs.tracing import Found, Place, Step, trace
    from jobs.views import States, View, states

__all__ = [
    "Audit",
    "Blame",
    "Differences",
    "Discarded",
    "Explanation",
    "Fate",
    "Found",
    "Handled",
    "Mended",
    "Outcome",
    "Place",
    "Rehearsal",
    "ReplayPlan",
    "Replayed",
    "Restored",
    "Selection",
    "Snapshot",
    "States",
    "StatesSource",
    "Step",
    "Swapped",
    "View",
    "abandon",
    "audit",
    "blame",
    "discard",
    "drop",
    "explain",
    "kafka",
    "mend",
    "plan_replay",
    "pointer_of",
    "rebuild",
    "redrive",
    "rehearse",
    "restore",
    "rollback",
    "run",
    "snapshot",
    "states",
    "submit_line",
    "swap",
    "trace",
]

_MODULES: Final = {
    "backup": ("Restored", "Snapshot", "restore", "snapshot"),
    "dead_letters.discard": ("Discarded", "discard"),
    "dead_letters.letters": ("Handled", "Selection"),
    "dead_letters.redrive": ("redrive",),
    "explaining.blame": ("Blame", "blame"),
    "explaining.explain": ("explain",),
    "explaining.outcome": ("Explanation", "Fate", "Outcome"),
    "mending": ("Mended", "mend"),
    "replay": (
        "Differences",
        "ReplayPlan",
        "Replayed",
        "Swapped",
        "abandon",
        "drop",
        "plan_replay",
        "pointer_of",
        "rebuild",
        "rollback",
        "swap",
    ),
    "refolding.audit": ("Audit", "audit"),
    "refolding.rehearse": ("Rehearsal", "rehearse"),
    "settings": ("kafka",),
    "submit": ("run",),
    "submit.command": ("submit_line",),
    "table.source": ("StatesSource",),
    "tracing": ("Found", "Place", "Step", "trace"),
    "views": ("States", "View", "states"),
}

__getattr__, __dir__ = lazy(__name__, _MODULES)

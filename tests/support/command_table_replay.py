"""The forms of the command that rebuilds states, as in `command_table`."""

from dataclasses import replace
from pathlib import Path

from aggregations.report import Report
from aggregations.run.mend import Mending
from jobs.comparing import Comparison
from jobs.mending import Mended
from jobs.replay import Differences, Replayed, ReplayPlan, Swapped
from persistence.pointer import Change, Pointer
from tests.support.command_table import BOOTSTRAP, FILE, FLOW, JSON, ROOT, STORE, Command, Option
from tests.support.command_table_refolding import FOLDED, HISTORY

POINTER = Pointer(3, 2, 1, 2, changes=(Change(0, "ann@host", "swap", 2, "a corrected fold"),))
CLUSTER = {"bootstrap": BOOTSTRAP, "kafka_settings": FILE, "root": ROOT}
COMMON = {
    "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
    "store": STORE,
    "json": JSON,
}
CHANGING = {
    **COMMON,
    "reason": Option("--reason other", {"why": "other"}, without="--reason fold"),
    "take_over": Option("--take-over", {"take_over": True}),
}
FOLDING = {
    **CHANGING,
    **CLUSTER,
    "dead_letters": Option("--dead-letters dead", {"dead_letters": "dead"}),
    "max_records": Option("--max-records 7", {"max_records": 7}),
    "accept": Option("--accept lost-records", {"accept": ["lost-records"]}),
}
AGAINST = Option("--against tests.support.pure_flow:flow", {"against.name": "fleet"})
MENDED = Mended(
    "flights", 1, "aircraft", 7, None, HISTORY, FOLDED, Comparison({}), {b"N1": Mending.CHANGED}, False, ("carrier",)
)
SAMPLE = Option("--sample 3", {"sample": 3})
LETTERS = Option("--letters drop", {"drop_letters": True})
OUTPUTS = Option("--outputs send", {"outputs": True})
SNAPSHOT = Option("--snapshot fleet.snapshot", {"snapshot": Path("fleet.snapshot")})
ARCHIVE = Option("--history parquet:lake", {"history": "parquet:lake"})

MENDING = {
    **COMMON,
    **CLUSTER,
    "history": ARCHIVE,
    "key": Option("--key N2 --key base64:/w==", {"keys": [b"N1", b"N2", b"\xff"]}),
    "stage": Option("--stage aircraft", {"stage": "aircraft"}, without="--stage carrier"),
    "snapshot": Option("--snapshot fleet.snapshot", {"snapshot": Path("fleet.snapshot")}),
    "journal": Option("--journal flights.journal", {"journal": "flights.journal"}),
    "accept": FOLDING["accept"],
    "sample": SAMPLE,
    "work": Option("--work here", {"work": Path("here")}),
}

REPLAY = {
    "headwater replay": Command(
        f"replay {FLOW} --bootstrap b:1",
        "jobs.replay.plan_replay",
        ReplayPlan("flights", 1, 2, False, (), (), {"carrier": 3}, None, POINTER),
        {
            **COMMON,
            **CLUSTER,
            "redefine": Option("--redefine", {"redefine": True}),
            "snapshot": SNAPSHOT,
            "history": ARCHIVE,
            "accept": FOLDING["accept"],
            "against": AGAINST,
            "sample": SAMPLE,
        },
    ),
    "headwater replay (apply)": Command(
        f"replay {FLOW} --apply --reason fold --bootstrap b:1",
        "jobs.replay.rebuild",
        Replayed("flights", 2, 1, Report(records=3, batches=1)),
        {
            **FOLDING,
            "redefine": Option("--redefine", {"redefine": True}),
            "snapshot": SNAPSHOT,
            "history": ARCHIVE,
            "outputs": OUTPUTS,
        },
    ),
    "headwater replay (swap)": Command(
        f"replay {FLOW} --swap --reason fold --bootstrap b:1",
        "jobs.replay.swap",
        Swapped("flights", 2, 1, True, Report(), Differences(Comparison({}), ("carrier",))),
        {**FOLDING, "history": ARCHIVE, "against": AGAINST, "letters": LETTERS, "sample": SAMPLE},
    ),
    "headwater replay (rollback)": Command(
        f"replay {FLOW} --rollback --reason fold --bootstrap b:1",
        "jobs.replay.rollback",
        POINTER,
        {**CHANGING, **CLUSTER, "accept": FOLDING["accept"]},
    ),
    "headwater replay (drop)": Command(
        f"replay {FLOW} --drop 1 --reason fold",
        "jobs.replay.drop",
        POINTER,
        {
            **CHANGING,
            "drop": Option("--drop 3", {"number": 3}, without="--drop 1"),
            "accept": Option("--accept no-rollback", {"accept": ["no-rollback"]}),
        },
    ),
    "headwater replay (key)": Command(
        f"replay {FLOW} --key N1 --stage carrier --bootstrap b:1",
        "jobs.mending.mend",
        MENDED,
        MENDING,
    ),
    "headwater replay (mend)": Command(
        f"replay {FLOW} --key N1 --stage carrier --apply --reason fold --bootstrap b:1",
        "jobs.mending.mend",
        replace(MENDED, applied=True, published=2),
        {**MENDING, "reason": CHANGING["reason"]},
    ),
    "headwater replay (abandon)": Command(
        f"replay {FLOW} --abandon --reason fold",
        "jobs.replay.abandon",
        POINTER,
        CHANGING,
    ),
}

REPLAY_ELSEWHERE = {"headwater replay": {"apply", "swap", "rollback", "abandon", "runner", "master", "conf"}}
"""Options that choose what is called, and with which runner: `tests/unit/test_cli_replay.py`."""

"""The commands that fold history again, as in `command_table`."""

from pathlib import Path

from jobs.comparing import Comparison
from jobs.refolding.audit import Audit
from jobs.refolding.fold import Folded
from jobs.refolding.history import History
from jobs.refolding.rehearse import Rehearsal
from tests.support.command_table import BOOTSTRAP, FILE, FLOW, JSON, ROOT, STORE, Command, Option

HISTORY = History({"legs": {0: 1}}, {"legs": {0: 3}})
FOLDED = Folded(2, {"overflow": 1}, 1, {})
SHARED = {
    "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
    "stage": Option("--stage carrier", {"stages": ["carrier"]}),
    "key": Option("--key UA --key base64:/w==", {"keys": [b"UA", b"\xff"]}),
    "sample": Option("--sample 3", {"sample": 3}),
    "generation": Option("--generation 3", {"generation": 3}),
    "accept": Option("--accept compacted-source", {"accept": ["compacted-source"]}),
    "work": Option("--work here", {"work": Path("here")}),
    "history": Option("--history parquet:lake", {"history": "parquet:lake"}),
    "bootstrap": BOOTSTRAP,
    "kafka_settings": FILE,
    "root": ROOT,
    "json": JSON,
}

REFOLDING = {
    "headwater rehearse": Command(
        f"rehearse {FLOW} --against jobs.demo.flow:flow --bootstrap b:1",
        "jobs.refolding.rehearse.rehearse",
        Rehearsal("fleet", HISTORY, FOLDED, FOLDED, Comparison({})),
        {
            **SHARED,
            "flow": Option("rehearse tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=f"rehearse {FLOW}"),
            "against": Option(
                "--against tests.support.pure_flow:flow",
                {"against.name": "fleet"},
                without="--against jobs.demo.flow:flow",
            ),
            "ranges": Option("--range flights.legs:0", {"ranges": ["flights.legs:0"]}),
        },
    ),
    "headwater audit": Command(
        f"audit {FLOW} --bootstrap b:1",
        "jobs.refolding.audit.audit",
        Audit("fleet", 1, 1, None, HISTORY, {}, FOLDED, {}, (0, 0), (), Comparison({})),
        {
            **SHARED,
            "store": STORE,
            "journal": Option("--journal fleet.journal", {"journal": "fleet.journal"}),
            "snapshot": Option("--snapshot fleet.snapshot", {"snapshot": Path("fleet.snapshot")}),
        },
    ),
}

"""The commands that save and restore states, as in `command_table`."""

from pathlib import Path

from jobs.backup import Restored, Snapshot
from tests.support.command_table import FLOW, JSON, STORE, Command, Option

BACKUP = {
    "headwater snapshot": Command(
        f"snapshot {FLOW} --to a.snapshot",
        "jobs.backup.snapshot",
        Snapshot(Path("a.snapshot"), "fleet", 1, {"carrier": 2}, 1, 1, {"legs": {0: 3}}, "00", 9),
        {
            "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
            "to": Option("--to b.snapshot", {"to": Path("b.snapshot")}, without="--to a.snapshot"),
            "replace": Option("--replace", {"replace": True}),
            "store": STORE,
            "generation": Option("--generation 3", {"generation": 3}),
            "json": JSON,
        },
    ),
    "headwater snapshot (remove)": Command(
        f"snapshot {FLOW} --remove redis://a#monday",
        "jobs.snapshot_places.remove",
        None,
        {
            "remove": Option(
                "--remove redis://a#friday", {"place": "redis://a#friday"}, without="--remove redis://a#monday"
            )
        },
    ),
    "headwater restore": Command(
        f"restore {FLOW} --from a.snapshot",
        "jobs.backup.restore",
        Restored({"carrier": 2}, 1, 2, 1),
        {
            "flow": Option("tests.support.pure_flow:flow", {"flow.name": "fleet"}, without=FLOW),
            "source": Option("--from b.snapshot", {"source": Path("b.snapshot")}, without="--from a.snapshot"),
            "store": STORE,
            "generation": Option("--generation 3", {"generation": 3}),
            "accept": Option("--accept snapshot-versions", {"accept": ["snapshot-versions"]}),
            "json": JSON,
        },
    ),
}

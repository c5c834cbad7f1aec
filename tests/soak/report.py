"""What a soak has done so far: kept in a file between two calls, and shown at the end of each."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "report.json"
_EVENTS = "events.log"


def log(home: Path, text: str) -> None:
    """Note what happens, for whoever has to find out why something went wrong."""
    with (home / _EVENTS).open("a") as events:
        events.write(f"{time.strftime('%H:%M:%S')} {text}\n")


@dataclass
class Soak:
    """What it is, and what came of it.

    Attributes:
        seed: What everything follows from.
        messages: Orders that are to be sent at least.
        keys: Customers, and articles.
        kills: Kills of services that are planned; the other disturbances go by it.
        stores: Kinds of the stores of the first and of the second stage.
        wanted: Planned disturbances by name.
        rounds: Rounds that are planned.
        done: Rounds that are done.
        sent: Orders sent.
        items: Items of these orders: the messages that the flow has to fold once.
        since: Ends of the topic of orders by partition when the last round was done.
        counts: Disturbances done by name.
        notes: What else happened, by what it was.
        seconds_to_commit: Seconds from each kill to the first commit behind it, by service.
        seconds_behind_outages: The same from the end of the last outage of a server between the kill and that commit;
            from the kill, if there was none.
        checks: Checks that held, by kind.
        exits: How services ended that nobody had killed.
        verdicts: What the flow decided, as its drivers told before they died.
        violations: What was wrong.
        skipped: Disturbances that this machine cannot do, and why.
        minutes: Time it took.
        finished: Whether all of it is done.
    """

    seed: int
    messages: int
    keys: int
    kills: int
    stores: list[str]
    wanted: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    done: int = 0
    sent: int = 0
    items: int = 0
    since: dict[str, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    seconds_to_commit: dict[str, list[float]] = field(default_factory=dict)
    seconds_behind_outages: dict[str, list[float]] = field(default_factory=dict)
    checks: Counter[str] = field(default_factory=Counter)
    exits: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    minutes: float = 0.0
    finished: bool = False

    @classmethod
    def load(cls, home: Path) -> "Soak | None":
        """What the directory has; None when it has none."""
        if not (home / FILE).exists():
            return None
        told = json.loads((home / FILE).read_text())
        known = {name: told[name] for name in cls.__dataclass_fields__}
        for name in ("counts", "notes", "checks", "exits", "verdicts"):
            known[name] = Counter(known[name])
        return cls(**known)

    def save(self, home: Path) -> None:
        """Replace the file in one step."""
        draft = home / f".{FILE}"
        draft.write_text(json.dumps(self.as_json(), indent=2) + "\n")
        draft.replace(home / FILE)

    def as_json(self) -> dict[str, Any]:
        """Everything, with the percentiles."""
        behind = _percentiles(self.seconds_behind_outages)
        return {
            **vars(self),
            "percentiles": {"with all": _percentiles(self.seconds_to_commit), "behind outages": behind},
        }

    def summary(self) -> dict[str, Any]:
        """The counts, and whether it held."""
        sums: Counter[str] = Counter()
        for name, count in self.counts.items():
            sums[name.split()[0]] += count
        return {
            "seed": self.seed,
            "orders": self.sent,
            "messages": self.items,
            "keys": self.keys,
            "rounds": self.done,
            "planned": self.rounds,
            "disturbances": dict(self.counts),
            "checks": dict(self.checks),
            "seconds_to_commit": _percentiles(self.seconds_to_commit),
            "seconds_behind_outages": _percentiles(self.seconds_behind_outages),
            "woken": {name: count for name, count in self.notes.items() if "woken" in name},
            "violations": len(self.violations),
            "finished": self.finished,
            "minutes": round(self.minutes, 1),
        }


def _percentiles(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"count": len(values), "p50": round(statistics.median(values), 1), "p99": round(_p99(values), 1)}
        for name, values in sorted(seconds.items())
        if values
    }


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def show(soak: Soak) -> None:
    """Write it for a person."""
    print(f"\nseed {soak.seed}: {soak.done} of {soak.rounds} rounds in {soak.minutes:.0f} minutes, ", end="")
    print(f"{soak.sent:,} orders, {soak.items:,} items, {soak.keys:,} customers and as many articles")
    rows = sorted(soak.wanted.items())
    print("\ndisturbance               done  planned")
    for name, wanted in rows:
        print(f"{name:24} {soak.counts[name]:5}  {wanted:7}")
    print("\nfrom a kill to the first commit, seconds        count    p50    p99")
    for title, seconds in (("", soak.seconds_to_commit), (", from the end of outages", soak.seconds_behind_outages)):
        for name, one in _percentiles(seconds).items():
            print(f"{name + title:44} {one['count']:8} {one['p50']:6} {one['p99']:6}")
    for title, counts in (
        ("checks", soak.checks),
        ("notes", soak.notes),
        ("verdicts", soak.verdicts),
        ("exits", soak.exits),
    ):
        print(f"\n{title}")
        for name, count in sorted(counts.items()):
            print(f"  {count:8,}  {name}")
    for line in soak.skipped:
        print(f"\nNOT DONE HERE: {line}")
    print(f"\n{'WRONG' if soak.violations else 'exact'}{'' if soak.finished else ' so far'}")
    for line in soak.violations:
        print(f"  {line}")

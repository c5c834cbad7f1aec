"""The progress of a soak: stored in a file between calls, and shown at the end of each."""

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
    """Log an event, to explain failures later."""
    with (home / _EVENTS).open("a") as events:
        events.write(f"{time.strftime('%H:%M:%S')} {text}\n")


@dataclass
class Soak:
    """Parameters and results of a soak.

    Attributes:
        seed: The seed.
        messages: Minimum number of orders.
        keys: Number of customers, and of articles.
        kills: Planned kills of services; the other disturbances are in proportion.
        stores: Kinds of the stores of the first and of the second stage.
        wanted: Planned disturbances by name.
        rounds: Planned rounds.
        done: Finished rounds.
        sent: Orders sent.
        items: Items of these orders: the messages that the flow must fold once.
        since: Ends of the topic of orders by partition after the last finished round.
        counts: Disturbances done, by name.
        notes: Other events, by name.
        seconds_to_commit: Seconds from each kill to the first commit after it, by service.
        seconds_alone: The same for kills in rounds in which no server was disturbed.
        checks: Checks that held, by kind.
        exits: How services ended that were not killed.
        verdicts: Counts of verdicts, as reported by the drivers before they ended.
        violations: The violations.
        skipped: Disturbances that this machine cannot do, with the reason.
        minutes: Duration.
        finished: Whether all rounds are done.
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
    seconds_alone: dict[str, list[float]] = field(default_factory=dict)
    checks: Counter[str] = field(default_factory=Counter)
    exits: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    minutes: float = 0.0
    finished: bool = False

    @classmethod
    def load(cls, home: Path) -> "Soak | None":
        """The soak in a directory; None if there is none."""
        if not (home / FILE).exists():
            return None
        stored = json.loads((home / FILE).read_text())
        known = {name: stored[name] for name in cls.__dataclass_fields__}
        for name in ("counts", "notes", "checks", "exits", "verdicts"):
            known[name] = Counter(known[name])
        return cls(**known)

    def save(self, home: Path) -> None:
        """Replace the file in one step."""
        draft = home / f".{FILE}"
        draft.write_text(json.dumps(self.as_json(), indent=2) + "\n")
        draft.replace(home / FILE)

    def as_json(self) -> dict[str, Any]:
        """All attributes, and the percentiles."""
        return {**vars(self), "percentiles": {"with all": _percentiles(self.seconds_to_commit),
                                                "alone": _percentiles(self.seconds_alone)}}  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """The counts, and whether all checks held."""
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
    """Print the soak for a person."""
    print(f"\nseed {soak.seed}: {soak.done} of {soak.rounds} rounds in {soak.minutes:.0f} minutes, ", end="")
    print(f"{soak.sent:,} orders, {soak.items:,} items, {soak.keys:,} customers and as many articles")
    rows = sorted(soak.wanted.items())
    print("\ndisturbance               done  planned")
    for name, wanted in rows:
        print(f"{name:24} {soak.counts[name]:5}  {wanted:7}")
    print("\nfrom a kill to the first commit, seconds        count    p50    p99")
    for title, seconds in (("", soak.seconds_to_commit), (", no server disturbed", soak.seconds_alone)):
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

"""From runs to one result: medians, ratios, JSON and a table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from benchmarks.measure import Run
from benchmarks.peers.base import EXACTLY_ONCE
from jobs.screen import table

OURS: Final = "headwater"
REFERENCE: Final = "kafka-streams"
SERVERS: Final = ("kafka", "redis", "cassandra")
"""Parts that are servers: their CPU is given apart from that of the system."""


@dataclass(slots=True)
class Subject:
    """One system on one store at one number of keys, and what became of its runs.

    Attributes:
        system: Its name.
        store: Where its states are.
        guarantee: What it claims.
        keys: Number of keys of the topic.
        events: Number of records in the topic.
        runs: One per round that ended well.
        unavailable: Why it could not be run at all; empty if it could.
        failed: Why a run failed; empty if none did.
    """

    system: str
    store: str
    guarantee: str
    keys: int
    events: int
    runs: list[Run] = field(default_factory=list)
    unavailable: str = ""
    failed: str = ""

    @property
    def verified(self) -> bool:
        """Whether every run had exactly the expected result."""
        return bool(self.runs) and not self.failed and not any(run.difference.keys for run in self.runs)

    @property
    def breaks_its_claim(self) -> bool:
        """Whether it claims to be exact and was not, or did not finish."""
        return self.guarantee == EXACTLY_ONCE and not self.unavailable and not self.verified

    @property
    def warm(self) -> float | None:
        """Median events a second over the second half of the topic."""
        return _median(run.warm for run in self.runs)

    @property
    def from_start(self) -> float | None:
        """Median events a second from the start of the process."""
        return _median(run.from_start for run in self.runs)

    @property
    def cpu_by_part(self) -> dict[str, float]:
        """Median CPU seconds per million events over the second half, by part; empty when not known."""
        known = [run.warm_cpu for run in self.runs if run.warm_cpu is not None]
        parts = dict.fromkeys(part for one in known for part in one)
        return {part: median(one.get(part, 0.0) for one in known) for part in parts}

    @property
    def cpu(self) -> float | None:
        """The sum of the system's own parts."""
        return sum(_own(self.cpu_by_part).values()) if self.cpu_by_part else None

    def as_json(self) -> dict[str, Any]:
        """The figures: medians over the rounds, and the difference of the worst run."""
        told: dict[str, Any] = {
            "system": self.system,
            "store": self.store,
            "keys": self.keys,
            "events": self.events,
            "guarantee": self.guarantee,
            "rounds": len(self.runs),
            "verified": self.verified,
        }
        if self.unavailable or self.failed:
            told |= {"unavailable": self.unavailable} if self.unavailable else {"failed": self.failed}
        if not self.runs:
            return told
        first_cpu = _median(sum(_own(run.first.cpu).values()) for run in self.runs)
        worst = max((run.difference for run in self.runs), key=lambda one: (one.keys, one.events))
        return told | {
            "events_per_second": _whole(self.warm),
            "from_start": _whole(self.from_start),
            "cpu_seconds_per_million": _rounded(self.cpu),
            "cpu_by_part": {part: _rounded(seconds) for part, seconds in self.cpu_by_part.items()},
            "seconds": _rounded(_median(run.last.seconds for run in self.runs)),
            "first_commit_seconds": _rounded(_median(run.first.seconds for run in self.runs)),
            "first_commit_cpu_seconds": _rounded(first_cpu),
            "peak_resident_mb": _peaks([run.peak_mb for run in self.runs]),
            "off_by": {"keys": worst.keys, "events": worst.events, "missing": worst.missing},
            "each_round": [_whole(run.warm) for run in self.runs],
        }


def ratios(subjects: Sequence[Subject], figure: Callable[[Subject], float | None]) -> dict[str, dict[str, float]]:
    """A figure of ours by that of Kafka Streams: number of keys -> our store -> ratio; only where both were measured."""
    found: dict[str, dict[str, float]] = {}
    for other in subjects:
        reference = figure(other) if other.system == REFERENCE else None
        for ours in subjects:
            if reference and ours.system == OURS and (ours.keys, ours.events) == (other.keys, other.events):
                value = figure(ours)
                if value is not None:
                    found.setdefault(str(ours.keys), {})[ours.store] = round(value / reference, 2)
    return found


def show(subjects: Sequence[Subject]) -> None:
    """Write the table to standard output."""
    text = ["system", "store", "guarantee", "of it", "verified"]
    columns = ["system", "store", "guarantee", "keys", "events", "events/s warm", "from start"]
    columns += ["CPU-s/M", "of it", "broker", "store server", "first commit s", "verified"]
    table([_row(subject) for subject in subjects], columns, left=text)


def _row(subject: Subject) -> list[object]:
    told = subject.as_json()
    parts = told.get("cpu_by_part", {})
    store = next((parts[name] for name in SERVERS[1:] if name in parts), None)  # an embedded one is the system's own
    return [
        subject.system,
        subject.store,
        subject.guarantee,
        subject.keys,
        subject.events,
        told.get("events_per_second"),
        told.get("from_start"),
        told.get("cpu_seconds_per_million"),
        ", ".join(f"{part} {seconds}" for part, seconds in _own(parts).items()),
        parts.get("kafka"),
        store,
        told.get("first_commit_seconds"),
        _judgement(subject),
    ]


def _judgement(subject: Subject) -> str:
    if subject.unavailable or subject.failed:
        return "unavailable" if subject.unavailable else "failed"
    if not subject.runs:
        return "not run"
    off = subject.as_json()["off_by"]
    return "yes" if subject.verified else f"no: {off['keys']:,} keys, {off['events']:,} events off"


def _own(cpu: Mapping[str, float]) -> dict[str, float]:
    """The system's own parts, without servers."""
    return {part: seconds for part, seconds in cpu.items() if part not in SERVERS}


def _median(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return median(known) if known else None


def _peaks(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {part: max(one.get(part, 0) for one in each) for part in dict.fromkeys(part for one in each for part in one)}


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 2)

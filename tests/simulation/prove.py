"""Runs many seeds, all schedules and all planted bugs, in several processes, resumably."""

import gc
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, count, islice
from pathlib import Path

import aggregations
import envelope
import persistence
from jobs import replaying, republish
from tests import simulation
from tests.simulation.bugs import BEGINS, MATTERS
from tests.simulation.oracle import Violation
from tests.simulation.planted import planted
from tests.simulation.schedules import explore, units
from tests.simulation.shrink import outcome
from tests.simulation.steps import draw_world

SEEDS_PER_BUG = 300
"""Number of seeds within which a planted bug must be found."""
_CHUNK = 20
_SAVE_SECONDS = 10.0


@dataclass(slots=True)
class Proof:
    """Progress and results.

    Attributes:
        code: Digest of the tested code.
        seeds: Seeds run, from 0 on.
        schedules: Schedules of faults run.
        units: Units of schedules run, in their order.
        violations: Violations, each with the arguments that repeat it.
        planted: Planted bugs that were searched for.
        found: Seed that found a planted bug, by its name.
    """

    code: str = ""
    seeds: int = 0
    schedules: int = 0
    units: int = 0
    violations: list[str] = field(default_factory=list)
    planted: int = 0
    found: dict[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether there was no violation, and every planted bug was found."""
        return not self.violations and len(self.found) >= self.planted

    def summary(self) -> dict[str, int]:
        """The counts."""
        return {
            "seeds": self.seeds,
            "schedules": self.schedules,
            "violations": len(self.violations),
            "planted": self.planted,
            "planted_found": len(self.found),
        }


class _Notes:
    """Shows progress, and saves it for the next call.

    Args:
        proof: The progress.
        state: File to save it to.
    """

    def __init__(self, proof: Proof, state: Path | None) -> None:
        self._proof = proof
        self._state = state
        self._next = time.monotonic() + _SAVE_SECONDS

    def note(self, text: str) -> None:
        """Show the progress, and save it from time to time."""
        if sys.stderr.isatty():
            print(f"\r{text:60}", end="", file=sys.stderr, flush=True)
        if time.monotonic() >= self._next:
            self.save()
            if not sys.stderr.isatty():
                print(text, file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write the state file."""
        self._next = time.monotonic() + _SAVE_SECONDS
        if self._state is not None:
            self._state.parent.mkdir(parents=True, exist_ok=True)
            new = self._state.with_suffix(".new")
            new.write_text(json.dumps(asdict(self._proof)))
            new.replace(self._state)


def prove(seeds: int, schedules: int, *, bugs: Sequence[str], state: Path | None = None, workers: int = 2) -> Proof:
    """Run seeds, schedules and planted bugs.

    Args:
        seeds: Number of seeds.
        schedules: Minimum number of schedules of faults, up to all of them.
        bugs: Names of the planted bugs to search for.
        state: File to save progress to, and to resume from if the code is the same.
        workers: Processes.
    """
    proof = _load(state)
    proof.planted = len(bugs)
    notes = _Notes(proof, state)
    # Not forked: polars' threads do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(workers, collect_rarely) as pool:
        chunks = [range(start, min(start + _CHUNK, seeds)) for start in range(proof.seeds, seeds, _CHUNK)]
        for chunk, violations in zip(chunks, pool.imap(_seeds, chunks), strict=True):
            proof.violations += violations
            proof.seeds = chunk.stop
            notes.note(f"seed {proof.seeds} of {seeds}")
        missing = [name for name in bugs if name not in proof.found]
        for name, seed in zip(missing, pool.imap(find, missing), strict=True):
            if seed is not None:
                proof.found[name] = seed
            notes.note(f"planted bug {name}")
        if proof.schedules < schedules:
            for unit in pool.imap(explore, units()[proof.units :], chunksize=4):
                proof.units += 1
                proof.schedules += unit.schedules
                proof.violations += unit.violations
                notes.note(f"schedule {proof.schedules} of {schedules}")
                if proof.schedules >= schedules:
                    break
        pool.terminate()
    notes.save()
    return proof


def collect_rarely() -> None:
    """Collect garbage rarely: it took a quarter of the time, and worlds create few reference cycles."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)


def find(name: str, first: int | None = None) -> int | None:
    """The first seed that finds a planted bug; None if none of the first worlds does.

    Worlds to which the bug does not apply are skipped.

    Args:
        name: Name of the bug.
        first: A seed to try before all others.
    """
    matters, begin = MATTERS.get(name), count(BEGINS.get(name, 0))
    worlds = (seed for seed in begin if matters is None or matters(draw_world(seed, 0)[0]))
    seeds = chain(() if first is None else (first,), islice(worlds, SEEDS_PER_BUG))
    with planted(name):
        return next((seed for seed in seeds if outcome(seed).startswith(Violation.__name__)), None)


def _seeds(seeds: Iterable[int]) -> list[str]:
    return [f"--seed {seed}: {text}" for seed in seeds if (text := outcome(seed))]


def _load(state: Path | None) -> Proof:
    code = _digest()
    if state is not None and state.exists():
        saved = Proof(**json.loads(state.read_text()))
        if saved.code == code:
            return saved
    return Proof(code)


def _digest() -> str:
    """Digest of every module that the simulation runs: after a change of the code, the proof starts over."""
    packages = (envelope, persistence, aggregations, replaying, republish, simulation)
    folders = [Path(package.__path__[0]) for package in packages]
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]

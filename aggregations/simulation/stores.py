"""Stores of one simulated world: the memory store with copies, and with saves that may be applied in part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from aggregations.simulation.faults import Crash
from aggregations.simulation.oracle import Violation
from persistence.memory import MemoryStore
from persistence.protocol import Capabilities, FlowRef, Manifest, StageRef, Stored, Write
from persistence.registry import register

SCHEME = "simulated"


@dataclass(frozen=True, slots=True)
class Copy:
    """What a store held at one moment."""

    terms: dict[Any, int]
    manifests: dict[Any, Manifest]
    stages: dict[Any, dict[bytes, Stored]]


class SimulatedStore(MemoryStore):
    """A memory store whose saves are not atomic: a crash may leave some writes of one applied.

    Attributes:
        dies_after: Writes of the next save that are applied before the process dies; None for no death.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dies_after: int | None = None

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, atomic_save=False)

    def save(self, stage: StageRef, writes: Sequence[Write], *, term: int, batch: int) -> None:
        dies, self.dies_after = self.dies_after if writes else None, None
        applied = writes if dies is None else writes[: dies % len(writes)]
        super().save(stage, applied, term=term, batch=batch)
        if applied:
            self._check_written(stage.flow_ref, term)
        if dies is not None:
            raise Crash("within a save")

    def save_manifest(self, flow: FlowRef, manifest: Manifest) -> None:
        super().save_manifest(flow, manifest)
        self._check_written(flow, manifest.term)

    def _check_written(self, flow: FlowRef, term: int) -> None:
        installed = self._terms.get(flow, 0)
        if term < installed:
            raise Violation(f"a run of term {term} wrote though {installed} is installed")

    def copy(self) -> Copy:
        """A copy of everything."""
        return Copy(dict(self._terms), dict(self._manifests), {ref: dict(of) for ref, of in self._stages.items()})

    def restore(self, copy: Copy) -> None:
        """Go back to a copy, or to nothing."""
        self._terms = dict(copy.terms)
        self._manifests = dict(copy.manifests)
        self._stages = {ref: dict(of) for ref, of in copy.stages.items()}

    def stage(self, ref: StageRef) -> dict[bytes, Stored]:
        """The states of a stage as they are."""
        return self._stages.get(ref, {})


_open: dict[str, SimulatedStore] = {}


def open_store(url: str) -> SimulatedStore:
    """Open `simulated://NAME`."""
    return _open.setdefault(urlsplit(url).netloc, SimulatedStore())


def forget(url: str) -> None:
    """Let a store go."""
    _open.pop(urlsplit(url).netloc, None)


register(SCHEME, "aggregations.simulation.stores:open_store")

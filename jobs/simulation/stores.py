"""Stores of one simulated world: the memory store with copies, and with saves that may be applied in part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from jobs.simulation.oracle import Violation
from persistence.cas import check_distinct
from persistence.faults import effect
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
    """A memory store whose saves are not atomic: every write of one is an effect of its own, `write:STAGE`."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, atomic_save=False)

    def save(self, stage: StageRef, writes: Sequence[Write], *, term: int, batch: int) -> None:
        check_distinct(stage, writes)
        for write in writes:
            effect(f"write:{stage.stage}", lambda write=write: self._write(stage, write, term, batch))  # type: ignore[misc]

    def save_manifest(self, flow: FlowRef, manifest: Manifest) -> None:
        super().save_manifest(flow, manifest)
        self._check_written(flow, manifest.term)

    def _write(self, stage: StageRef, write: Write, term: int, batch: int) -> None:
        super().save(stage, [write], term=term, batch=batch)
        self._check_written(stage.flow_ref, term)

    def _check_written(self, flow: FlowRef, term: int) -> None:
        installed = self.installed_term(flow)
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


register(SCHEME, "jobs.simulation.stores:open_store")

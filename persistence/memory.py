"""States in a dictionary: the oracle of the other stores, and the store of tests and simulations."""

import threading
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from persistence.cas import check_distinct, check_is_term, check_manifest, check_term, settle
from persistence.errors import Fenced
from persistence.protocol import Capabilities, FlowRef, Manifest, StageRef, Stored, Write

_CAPABILITIES = Capabilities(atomic_save=True, ordered_scan=True)


class MemoryStore:
    """Keeps states as long as the process lives. Keeps every promise of `StateStore` but durability."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._terms: dict[FlowRef, int] = {}
        self._manifests: dict[FlowRef, Manifest] = {}
        self._stages: dict[StageRef, dict[bytes, Stored]] = {}

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def acquire_term(self, flow: FlowRef, *, above: int = 0) -> int:
        with self._lock:
            term = max(self.installed_term(flow), above) + 1
            self._terms[flow] = term
            return term

    def install_term(self, flow: FlowRef, term: int) -> None:
        check_is_term(flow, term)
        with self._lock:
            installed = self.installed_term(flow)
            if installed > term:
                raise Fenced.by(flow, term, installed)
            self._terms[flow] = term

    def installed_term(self, flow: FlowRef) -> int:
        return self._terms.get(flow, 0)

    def load(self, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        with self._lock:
            states = self._stages.get(stage, {})
            return {key: states[key] for key in keys if key in states}

    def save(self, stage: StageRef, writes: Sequence[Write], *, term: int, batch: int) -> None:
        check_distinct(stage, writes)
        if not writes:
            return
        with self._lock:
            check_term(stage, term, self.installed_term(stage.flow_ref))
            states = self._stages.setdefault(stage, {})
            for write in settle(stage, writes, states, term=term, batch=batch):
                states[write.key] = Stored(write.expected + 1, term, batch, write.value)

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        return self._manifests.get(flow)

    def save_manifest(self, flow: FlowRef, manifest: Manifest) -> None:
        with self._lock:
            check_manifest(flow, manifest, self._manifests.get(flow), self.installed_term(flow))
            self._manifests[flow] = manifest

    def scan(self, stage: StageRef) -> Iterator[tuple[bytes, Stored]]:
        with self._lock:
            states = sorted(self._stages.get(stage, {}).items())
        yield from states

    def close(self) -> None:
        """Do nothing: other handles of the same name go on."""


_named: dict[str, MemoryStore] = {}


def open_store(url: str) -> MemoryStore:
    """Open `memory://NAME`. The same name is the same store, within one process."""
    return _named.setdefault(urlsplit(url).netloc, MemoryStore())

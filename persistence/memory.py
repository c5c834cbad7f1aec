"""States in a dictionary: the reference for the other stores, and the store of tests and simulations."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from persistence.cas import (
    check_distinct,
    check_epoch,
    check_is_epoch,
    check_manifest,
    check_not_removed,
    later,
    resolve,
)
from persistence.commit.faults import DROP, effect
from persistence.errors import Fenced
from persistence.marks import NONE, Acknowledged, Bucket, Mark, Marks, check_held
from persistence.protocol import Capabilities, FlowRef, Manifest, Removed, StageRef, Stored, Write

_CAPABILITIES = Capabilities(ordered_durability=True, atomic_save=True, ordered_scan=True, marked=True, counted=True)

_EMPTY = Bucket()


class MemoryStore:
    """Keeps states as long as the process lives. Implements the contract of `StateStore`, without durability."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epochs: dict[FlowRef, int] = {}
        self._manifests: dict[FlowRef, Manifest] = {}
        self._stages: dict[StageRef, dict[bytes, Stored]] = {}
        self._buckets: dict[StageRef, dict[str, Bucket]] = {}
        self._dues: dict[StageRef, dict[bytes, int]] = {}
        self._removed: dict[StageRef, dict[str, int]] = {}

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def acquire_epoch(self, flow: FlowRef, *, above: int = 0) -> int:
        with self._lock:
            epoch = max(self.installed_epoch(flow), above) + 1
            self._epochs[flow] = epoch
            return epoch

    def install_epoch(self, flow: FlowRef, epoch: int) -> None:
        check_is_epoch(flow, epoch)
        with self._lock:
            installed = self.installed_epoch(flow)
            if installed > epoch:
                raise Fenced.by(flow, epoch, installed)
            self._epochs[flow] = epoch

    def installed_epoch(self, flow: FlowRef) -> int:
        return self._epochs.get(flow, 0)

    def load(self, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        with self._lock:
            states = self._stages.get(stage, {})
            return {key: states[key] for key in keys if key in states}

    def save(
        self,
        stage: StageRef,
        writes: Sequence[Write],
        *,
        epoch: int,
        batch: int,
        known: Marks = NONE,
        downstream: Acknowledged = NONE,
    ) -> Marks:
        check_distinct(stage, writes)
        if not writes:
            return {}
        with self._lock:
            check_epoch(stage, epoch, self.installed_epoch(stage.flow_ref))
            buckets = self._buckets.setdefault(stage, {})
            touched = {self._bucket_of(write.key) for write in writes}
            for name in touched:
                check_held(stage, name, buckets.get(name, _EMPTY).mark, known)
                mine = [write for write in writes if self._bucket_of(write.key) == name]
                check_not_removed(stage, mine, self._removed.get(stage, {}).get(name))
            states = self._stages.setdefault(stage, {})
            todo = resolve(stage, writes, states, epoch=epoch, batch=batch)
            for write in todo:
                states[write.key] = Stored(write.expected + 1, epoch, batch, write.value)
                dues = self._dues.setdefault(stage, {})
                if (due := later(dues.get(write.key), write.due)) is not None:
                    dues[write.key] = due
            for name in {self._bucket_of(write.key) for write in todo}:
                buckets[name] = self._saved(buckets.get(name, _EMPTY).mark, epoch, downstream)
            return {name: buckets[name].mark for name in touched if name in buckets}

    def remove(self, stage: StageRef, until: int, *, epoch: int, batch: int, known: Marks = NONE) -> Removed:
        gone = [self._remove_from(stage, name, until, epoch, known) for name in self._bucket_names()]
        held = self._buckets.get(stage, {})
        return Removed(sum(gone), {name: bucket.mark for name, bucket in held.items()})

    def _remove_from(self, stage: StageRef, name: str, until: int, epoch: int, known: Marks) -> int:
        """Remove the states of one bucket that are due, and return their number."""
        with self._lock:
            check_epoch(stage, epoch, self.installed_epoch(stage.flow_ref))
            buckets = self._buckets.setdefault(stage, {})
            held = buckets.get(name, _EMPTY)
            check_held(stage, name, held.mark, known)
            states, dues = self._stages.get(stage, {}), self._dues.get(stage, {})
            gone = [key for key, due in dues.items() if due <= until and self._bucket_of(key) == name]
            for key in gone:
                del states[key], dues[key]
            if gone:
                buckets[name] = self._saved(held.mark, held.epoch, held.downstream)
            removed = self._removed.setdefault(stage, {})
            removed[name] = max(until, removed.get(name, until))
            return len(gone)

    def due(self, stage: StageRef, until: int, *, after: int | None = None) -> Iterator[bytes]:
        with self._lock:
            dues = list(self._dues.get(stage, {}).items())
        return (key for key, due in dues if due <= until and (after is None or due > after))

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        with self._lock:
            held = dict.fromkeys(self._bucket_names(), _EMPTY) | self._buckets.get(stage, {})
            removed = self._removed.get(stage, {})
            return {name: msgspec.structs.replace(one, removed=removed.get(name)) for name, one in held.items()}

    def _bucket_names(self) -> Sequence[str]:
        return ("0",)

    def _bucket_of(self, key: bytes) -> str:
        return "0"

    def _saved(self, mark: Mark, epoch: int, downstream: Acknowledged) -> Bucket:
        return Bucket(mark.next(), epoch, downstream)

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        return self._manifests.get(flow)

    def save_manifest(self, flow: FlowRef, manifest: Manifest, *, after: tuple[int, int] = (0, 0)) -> None:
        with self._lock:
            check_manifest(flow, manifest, self._manifests.get(flow), self.installed_epoch(flow), after)
            self._manifests[flow] = manifest

    def drop(self, flow: FlowRef) -> None:
        effect(DROP, lambda: self._drop(flow))

    def _drop(self, flow: FlowRef) -> None:
        with self._lock:
            for held in (self._stages, self._buckets, self._dues, self._removed):
                for stage in [one for one in held if one.flow_ref == flow]:
                    del held[stage]
            self._manifests.pop(flow, None)
            self._epochs.pop(flow, None)

    def scan(
        self, stage: StageRef, *, bucket: str | None = None, begin: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, Stored]]:
        with self._lock:
            states = sorted(self._stages.get(stage, {}).items())
        for key, stored in states:
            if key >= begin and (end is None or key < end) and bucket in (None, self._bucket_of(key)):
                yield key, stored

    def close(self) -> None:
        """Do nothing: other handles of the same name stay open."""


_named: dict[str, MemoryStore] = {}


def open_store(url: str) -> MemoryStore:
    """Open `memory://NAME`. The same name is the same store, within one process."""
    return _named.setdefault(urlsplit(url).netloc, MemoryStore())

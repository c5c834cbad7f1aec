"""What the stores of a run have acknowledged to it: a store that no longer has it went back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from persistence.cas import manifest_behind
from persistence.manifest import Manifest
from persistence.marks import Bucket, KnownMarks
from persistence.protocol import FlowRef


@dataclass(slots=True)
class AcknowledgedWrites:
    """Manifests and marks that the stores of one run have acknowledged.

    Attributes:
        ref: The flow's name and generation.
        stages: Names of its stages, upstream first.
        known: Marks of the buckets.
        since: First epoch whose marks count; see `Manifest.since`.
    """

    ref: FlowRef
    stages: Sequence[str]
    known: KnownMarks
    since: int = 0
    _manifests: dict[str, tuple[int, int]] = field(default_factory=dict)
    _marks: dict[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)

    def learn(
        self, manifests: Sequence[tuple[str, Manifest | None]], buckets: Mapping[str, Mapping[str, Bucket]]
    ) -> None:
        """Begin with what the stores have.

        Args:
            manifests: (first stage of the store, its manifest).
            buckets: Buckets by stage, for stages whose stores keep marks.
        """
        found = {name: one for name, one in manifests if one is not None}
        self.since = max((one.since for one in found.values()), default=0)
        self._manifests = {name: (one.epoch, one.batch) for name, one in found.items()}
        self._marks = {name: one.marks for name, one in found.items()}
        self._learn(buckets)

    def manifest(self, name: str) -> tuple[int, int]:
        """Epoch and batch of the last manifest that the store of that name acknowledged; zeros when there is none."""
        return self._manifests.get(name, (0, 0))

    def marks(self, name: str, *, commits: bool) -> Mapping[str, Mapping[str, str]]:
        """Marks for the manifest of the store of that name; unless it commits a batch, those of the previous one."""
        # Marks of the stages here and downstream: an upstream stage that goes back with its manifest is filled again.
        if commits:
            self._marks[name] = self.known.acknowledged(self.stages[self.stages.index(name) :])
        return self._marks.get(name, {})

    def saved(self, name: str, manifest: Manifest) -> None:
        """Note a manifest that the store of that name has acknowledged."""
        self._manifests[name] = (manifest.epoch, manifest.batch)

    def check_manifest(self, name: str, found: Manifest | None) -> None:
        """Check the manifest that the store of that name has.

        Raises:
            StoreWentBack: It is older than the last one that the store acknowledged.
        """
        stored = (found.epoch, found.batch) if found is not None else (0, 0)
        if stored < self.manifest(name):
            raise manifest_behind(self.ref, self.manifest(name), stored)

    def check_buckets(self, buckets: Mapping[str, Mapping[str, Bucket]], *, epoch: int) -> None:
        """Check the marks that the buckets have, and use them as known marks.

        Raises:
            StoreWentBack: A bucket lost writes that it acknowledged to this run, or to a bucket upstream of it.
        """
        self._learn(buckets)
        for held in buckets.values():
            for one in held.values():
                for stage, marks in one.downstream.items() if one.epoch == epoch else ():
                    self.known.check(stage, marks)

    def _learn(self, buckets: Mapping[str, Mapping[str, Bucket]]) -> None:
        for stage, held in buckets.items():
            self.known.learn(stage, {bucket: one.mark for bucket, one in held.items()})

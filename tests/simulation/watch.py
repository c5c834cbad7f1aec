"""The invariants after every step, checked for everything that has changed since the last one."""

from collections.abc import Sequence

from aggregations.definition.element import Record
from persistence.names import FlowRef
from persistence.record import decode_record
from tests.simulation.oracle import Oracle, Violation
from tests.simulation.sessions import whole
from tests.simulation.stores import SimulatedStore
from tests.simulation.topology import FLOW, Spec


class Watch:
    """Checks the stores.

    Args:
        spec: The world.
        oracle: The expected content.
        stores: Store of every stage.

    Attributes:
        ref: The flow and its live generation.
        held: Ids held per stage, without stages that only count; for a flow without a stage, ids that were published.
    """

    def __init__(self, spec: Spec, oracle: Oracle, stores: Sequence[SimulatedStore]) -> None:
        self._spec = spec
        self._oracle = oracle
        self._stores = stores
        self.ref = FlowRef(FLOW)
        self._names: dict[tuple[str, int, int], tuple[str, str]] = {}
        self.forget()

    def forget(self) -> None:
        """Check everything again, because a store went back."""
        self.held: dict[int, set[str]] = {i: set() for i, stage in enumerate(self._spec.stages) if stage.seen}
        self._versions: dict[tuple[int, bytes], tuple[int, int]] = {}
        self._covered: dict[tuple[int, str, int], int] = {}

    def arrived(self, record: Record, message: str, redriven: str) -> None:
        """Note which logical message a record of the flow's sources is, and the stage that it is redriven to."""
        self._names[record.topic_id, record.partition, record.offset] = (message, redriven)

    def went_back(self, topic_id: str, partition: int, end: int) -> None:
        """Forget the records of a log from an offset on, which others get."""
        gone = [at for at in self._names if at[:2] == (topic_id, partition) and at[2] >= end]
        for at in gone:
            del self._names[at]
        for place in self._covered:
            if place[1:] == (topic_id, partition):
                self._covered[place] = min(self._covered[place], end)

    def check(self) -> None:
        """Check every invariant.

        Raises:
            Violation: One does not hold.
        """
        new = {i: self._changed(i) for i in self.held}
        # An upstream state may hold only events that every downstream state holds.
        for i, ids in new.items():
            for one in ids:
                self._oracle.check_passed_on(one, i, self.held)
        self._check_manifests()

    def _changed(self, i: int) -> set[str]:
        if not self._spec.folds:
            new = self._oracle.outputs.keys() - self.held[i]
            self.held[i] |= new
            return new
        new = set()
        ref = self.ref.stage(self._spec.stages[i].name)
        for key, stored in self._stores[i].stage(ref).items():
            version = (stored.version, stored.epoch)
            if self._versions.get((i, key)) == version:
                continue
            before = self._versions.get((i, key), (0, 0))
            if version[0] <= before[0] or version[1] < before[1]:
                raise Violation(f"stage {ref.stage}, key {key!r}: {version} was written over {before} (version, epoch)")
            self._versions[i, key] = version
            found = decode_record(stored.value, ref, key).state
            state = whole(found) if self._spec.sessions else found or {}
            self._oracle.check_state(i, key.decode(), state)
            new |= state.keys() - self.held[i]
        self.held[i] |= new
        return new

    def _check_manifests(self) -> None:
        """Check that every record below a manifest is in the states of its store."""
        for i, store in enumerate(self._stores):
            manifest = store.load_manifest(self.ref)
            if manifest is None or i not in self.held:
                continue
            places = [
                (topic, partition, progress)
                for topic in self._spec.sources
                for partition, progress in manifest.positions.get(topic, {}).items()
            ]
            for topic, partition, progress in places:
                topic_id = manifest.topic_ids.get(topic, "")
                at = (i, topic_id, partition)
                for offset in range(self._covered.get(at, 0), progress.next_offset):
                    message, redriven = self._names.get((topic_id, partition, offset), ("", ""))
                    if not message:
                        continue  # there is no record at this offset
                    if redriven > self._spec.stages[i].name:
                        continue  # it passes through; this stage holds the rejected record itself
                    self._oracle.check_held(message, i, self.held, f"manifest of {topic}:{partition}")
                self._covered[at] = progress.next_offset

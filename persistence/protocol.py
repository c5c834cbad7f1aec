"""The interface of stores. The docstring of `StateStore` is the contract; `persistence.contract` contains its tests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from persistence.manifest import Manifest, Progress
from persistence.marks import NONE, Acknowledged, Bucket, Marks
from persistence.names import FlowRef, StageRef

__all__ = [
    "Capabilities", "FlowRef", "Manifest", "Progress", "Removed", "StageRef", "StateStore", "Stored", "Write",
]  # fmt: skip


class Stored(msgspec.Struct, frozen=True, gc=False):
    """One state as stored.

    Attributes:
        version: Number of writes to it; the first write sets it to 1.
        epoch: Epoch of the run that wrote it.
        batch: Batch of that run.
        value: The state record (`persistence.record`); opaque bytes for the store.
    """

    version: int
    epoch: int
    batch: int
    value: bytes


class Write(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One state to be replaced.

    Attributes:
        key: Key of the state within its stage.
        expected: Version that was loaded; 0 when there was no state.
        value: The new state record.
        due: Event time from which the state may be removed, in seconds since 1970; None leaves it as it is.
    """

    key: bytes
    expected: int
    value: bytes
    due: int | None = None


class Removed(msgspec.Struct, frozen=True):
    """Result of `StateStore.remove`.

    Attributes:
        states: Number of states that it removed. If the answer of a server was lost, those of that call are not counted.
        marks: The mark of each bucket that it accessed; empty for a store that is not `marked`.
    """

    states: int
    marks: Marks


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store supports beyond the contract. Tests and preflight check capabilities, never the name of a store.

    Attributes:
        durable: Acknowledged writes survive a crash of every process and a loss of power.
        ordered_durability: After a crash the store contains an earlier consistent cut of its writes: no
            write survives if a write acknowledged before it is lost. A store with neither `durable` nor
            `ordered_durability` may keep a manifest, or an upstream stage, whose states are lost: a flow on it is
            refused.
        shared: Other processes and, for servers, other machines see the same states.
        fenced: The epoch is checked in the same atomic step as the write.
        conditional: The version is compared in the same atomic step as the write. Without it, if two
            writers of one epoch replace a state at the same moment, one of the writes may be lost; so may a state that
            is created again after its removal.
        atomic_save: One `save` applies all of its writes or none.
        ordered_scan: `scan` yields keys in ascending order of their bytes.
        marked: It keeps a mark for each bucket, so that a bucket that went back is detected (contract 23 to 26).
        counted: Every save that changes a bucket has its own mark. Without it the saves of one batch share a mark, and
            the loss of a part of a batch in a bucket is not detected.
        max_key_bytes: Longest key in bytes; None without a limit below 32 KiB.
        max_value_bytes: Longest value in bytes; None without a limit below 16 MiB.
    """

    durable: bool = False
    ordered_durability: bool = False
    shared: bool = False
    fenced: bool = True
    conditional: bool = True
    atomic_save: bool = False
    ordered_scan: bool = False
    marked: bool = False
    counted: bool = False
    max_key_bytes: int | None = None
    max_value_bytes: int | None = None


class StateStore(Protocol):
    """Stores the states of flows: one value per (flow, generation, stage, key).

    The contract, rule by rule (the tests of `persistence.contract` cite the numbers):

    Epochs
      1. `acquire_epoch` returns a number that this store never returned before for the flow and that is
         higher than every epoch it knows and than `above`; it is installed when the call returns.
      2. `install_epoch` makes the given epoch the installed one. A repeated call with the same epoch
         changes nothing; a lower epoch raises `Fenced`.
      3. `installed_epoch` returns the installed epoch, 0 when there is none.
         Epochs count from 1; installing or writing with a lower number raises ValueError.
      4. Epochs of different flows and of different generations of a flow are independent.
      5. Once an epoch is installed, no write of a lower epoch takes effect, not even one that was
         sent before: it raises `Fenced` and changes nothing. A store that is not `fenced` may
         accept such a write within the gap that it documents.
      6. A write of an epoch higher than the installed one raises `Terminal`: the store has lost
         the epoch, so it was emptied or replaced by an older copy while the flow ran.

    States
      7. `load` returns the states that exist among `keys`; keys without a state are missing in the result.
         A key may be any bytes, the empty key included, up to the limit in `capabilities`.
      8. After `save` has acknowledged a state, every later `load` of any handle returns it, until it is replaced.
      9. `save` replaces a state if and only if its version is the `expected` one; the version
         then becomes `expected + 1`. 0 stands for "no state". Value, version, epoch and batch
         change together: a reader sees all of the old state or all of the new state.
      10. A repeated write (same epoch, batch and value, found at version `expected + 1`)
          succeeds and changes nothing, so a task can be retried safely.
      11. If a stored state has a higher epoch than the writer, `save` raises `Fenced`, before any other check.
      12. If any other state has another version, `save` raises `Conflict` with exactly those keys. The capability
          `atomic_save` decides whether the writes of the call that did not conflict take effect:
          with it none does, without it each does or does not, as a whole.
      13. A call may have any number of writes; the store splits them as needed. Without writes
          it does nothing. If a key occurs twice in one call, it raises ValueError and writes nothing.
      14. An unknown outcome (a timeout, a cut connection) is resolved by reading back, never by
          a blind second write. If that fails as well, the call raises `Transient`: the writes
          then did or did not take effect, each as a whole.
      15. States of different stages, generations and flows are independent.
      16. `scan` yields every state that exists during the whole scan exactly once, as a stream.
          States written during the scan may be missing.

    Manifests
      17. `load_manifest` returns the manifest saved last, equal to the one passed in, or None.
      18. `save_manifest` follows 5 and 6 with the manifest's own epoch. Within an epoch the batch
          never goes back: a lower batch raises `Fenced`. Saving the same manifest again succeeds.

    Marks, of a store that is `marked` (`persistence.marks`)
      23. The states of a stage are divided into buckets, and `save` returns the mark of each bucket that it accessed. A
          save that changes a state raises its bucket's mark in the same atomic step; any other save keeps the mark.
      24. A `save` with a known mark that its bucket does not hold raises `StoreWentBack` and changes nothing in
          that bucket. A bucket that is ahead of the known mark is not an error.
      25. `marks` returns every bucket of a stage, with its mark and the `downstream` argument of the last save that
          changed the bucket.
      26. `save_manifest` with `after` raises `StoreWentBack` and changes nothing if the manifest in the store is older.

    Removal
      28. A write may name the event time at which its state is due, not before the one that an earlier write of this
          state named. `remove` removes all states of a stage that are due at or before a time, and no others. A state
          without such a time stays.
      29. Each bucket keeps the highest time up to which states were removed, which `marks` returns. It is raised in the
          same atomic step in which the first of these states leave the bucket, or before, and never falls.
      30. A `save` of a write that is due at or before this time raises `Conflict` with its key, even if it is a
          repeated write: no state returns.
      31. `remove` follows 5, 6, 23 and 24 like `save`. It may be repeated, also after it was interrupted at any point.
      32. `due` yields the keys of the states of a stage that are due after one time and at or before another, each once,
          as a stream. While states of the stage are written or removed, some may be missing, or occur twice.

    Generations
      33. `drop` removes everything that the store has of a generation: states, marks, manifest and epoch, and nothing of
          others. The epoch leaves last, so a call that was interrupted is repeated. Afterwards writes of all its earlier
          runs raise `Terminal` (6). Whether the number can be used again depends on the store.

    Parts of a scan
      27. With `begin` and `end`, `scan` yields only the keys from `begin` up to but not including `end`, in the order
          of their bytes. With `bucket`, one of `marks`, it yields only the states of this bucket: the scans of all
          buckets together yield every state once.

    All
      19. Acknowledged writes survive a kill of the client (kill -9), and, if `capabilities.durable`, a crash of the
          server and of the machine.
      20. A handle may be used by several threads, and after a fork by the child as well as by the parent.
      21. `close` releases connections; a second call does nothing. It never waits for the network.
      22. Every failure is one of `persistence.errors`; no message contains a secret, a state or a payload.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this store supports beyond the contract."""
        ...

    def acquire_epoch(self, flow: FlowRef, *, above: int = 0) -> int:
        """Begin a run: return a new epoch that is already installed in this store.

        Args:
            flow: The flow that begins to run.
            above: Highest epoch known from other stores. It matters when this store, which assigns
                the epochs, was restored from an older copy.
        """
        ...

    def install_epoch(self, flow: FlowRef, epoch: int) -> None:
        """Fence every lower epoch.

        Raises:
            Fenced: A higher epoch is installed.
        """
        ...

    def installed_epoch(self, flow: FlowRef) -> int:
        """Return the installed epoch, 0 when there is none."""
        ...

    def load(self, stage: StageRef, keys: Sequence[bytes]) -> dict[bytes, Stored]:
        """Return the states of `keys`; keys without a state are missing in the result."""
        ...

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
        """Replace states, each only if its version is still the one that was loaded.

        Args:
            stage: The stage.
            writes: The new states.
            epoch: Epoch of the run.
            batch: Number of the batch within the run.
            known: Marks that the stage's buckets are known to have reached.
            downstream: Marks that the stages downstream have acknowledged, to be stored with the states.

        Returns:
            The mark of each bucket that was accessed; empty for a store that is not `marked`.

        Raises:
            StoreWentBack: A bucket does not hold its known mark.
            Fenced: A higher epoch is installed, or has written one of the states.
            Conflict: Some states have changed since they were loaded.
            Terminal: The store does not know this epoch, or a key or value is too long.
            ValueError: A key occurs twice.
        """
        ...

    def remove(self, stage: StageRef, until: int, *, epoch: int, batch: int, known: Marks = NONE) -> Removed:
        """Remove the states of a stage that are due at or before `until`.

        Args:
            stage: The stage.
            until: Event time, in seconds since 1970.
            epoch: Epoch of the run.
            batch: Number of the batch within the run after whose manifest they leave.
            known: Marks that the stage's buckets are known to have reached.

        Raises:
            StoreWentBack: A bucket does not hold its known mark.
            Fenced: A higher epoch is installed.
            Terminal: The store does not know this epoch.
        """
        ...

    def due(self, stage: StageRef, until: int, *, after: int | None = None) -> Iterator[bytes]:
        """Yield the keys of the states of a stage that are due at or before `until`.

        Args:
            stage: The stage.
            until: Event time, in seconds since 1970.
            after: Only the states that are due after this time; None for all.
        """
        ...

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        """Return the mark and notes of each bucket of a stage; empty for a store that is not `marked`."""
        ...

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        """Return the flow's manifest, None when it has none.

        Raises:
            Corrupt: It cannot be read.
        """
        ...

    def save_manifest(self, flow: FlowRef, manifest: Manifest, *, after: tuple[int, int] = (0, 0)) -> None:
        """Replace the flow's manifest.

        Args:
            flow: The flow.
            manifest: The new manifest.
            after: Epoch and batch of the manifest that the store is known to contain.

        Raises:
            StoreWentBack: The manifest in the store is older than that.
            Fenced: A higher epoch is installed, or a later batch of this epoch has been saved.
        """
        ...

    def drop(self, flow: FlowRef) -> None:
        """Remove everything that the store has of a generation; nothing if there is nothing.

        No run may be at work on it: an epoch that was acquired for this fences them.
        """
        ...

    def scan(
        self, stage: StageRef, *, bucket: str | None = None, begin: bytes = b"", end: bytes | None = None
    ) -> Iterator[tuple[bytes, Stored]]:
        """Yield the states of a stage.

        Args:
            stage: The stage.
            bucket: Only the states of this bucket, one of `marks`; None for all.
            begin: The lowest key.
            end: The first key that is too high; None without a limit.
        """
        ...

    def close(self) -> None:
        """Release connections. May be called again."""
        ...

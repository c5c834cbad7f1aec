"""What every store promises. The docstring of `StateStore` is the contract, `persistence.contract` the judge."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from persistence.manifest import Manifest, Progress
from persistence.marks import NONE, Acknowledged, Bucket, Marks
from persistence.names import FlowRef, StageRef

__all__ = ["Capabilities", "FlowRef", "Manifest", "Progress", "StageRef", "StateStore", "Stored", "Write"]


class Stored(msgspec.Struct, frozen=True, gc=False):
    """One state as it stands in a store.

    Attributes:
        version: Number of writes it has had; the first makes it 1.
        epoch: Epoch of the run that wrote it.
        batch: Batch of that run.
        value: The state record (`persistence.record`); any bytes to the store.
    """

    version: int
    epoch: int
    batch: int
    value: bytes


class Write(msgspec.Struct, frozen=True, gc=False):
    """One state to be replaced.

    Attributes:
        key: Key of the state within its stage.
        expected: Version that was loaded; 0 when there was no state.
        value: The new state record.
    """

    key: bytes
    expected: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do beyond the contract, so that tests and preflight ask for it, never for a name.

    Attributes:
        durable: What was acknowledged survives a crash of every process and a loss of power.
        ordered_durability: What is left after a crash of the store is an earlier cut of it: no
            write survives while one acknowledged before it is lost. A store that is neither durable nor
            this may keep a manifest, or an upstream stage, whose states are lost: a flow is refused there.
        shared: Other processes and, for servers, other machines see the same states.
        fenced: The epoch is checked in the same atomic step that writes.
        conditional: The version is compared in the same atomic step that writes. Without it, of two
            writers of one epoch that replace a state at the same moment one may be lost.
        atomic_save: One `save` applies all of its writes or none.
        ordered_scan: `scan` yields keys in ascending order of their bytes.
        marked: It keeps a mark for each bucket, so that a bucket that went back is noticed (contract 23 to 26).
        counted: Every save that changes a bucket has a mark of its own. Without it saves of one batch share one, and
            what a bucket loses of a batch while it keeps the rest of it is not noticed.
        max_key_bytes: Longest key; None without a limit below 32 KiB.
        max_value_bytes: Longest value; None without a limit below 16 MiB.
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
    """Keeps the states of flows: one value per (flow, generation, stage, key).

    The contract, sentence by sentence (the tests of `persistence.contract` cite the numbers):

    Epochs
      1. `acquire_epoch` returns a number that this store never returned before for the flow and that is
         higher than every epoch it knows and than `above`; it is installed when the call returns.
      2. `install_epoch` makes the given epoch the installed one. Again with the same epoch: nothing
         happens. With a lower one: `Fenced`.
      3. `installed_epoch` returns the installed epoch, 0 when there is none.
         Epochs count from 1; to install or to write with a lower number is a ValueError.
      4. Epochs of different flows and of different generations of a flow are independent.
      5. Once an epoch is installed, no write of a lower epoch takes effect, not even one that was
         sent before: it ends in `Fenced` and changes nothing. A store that is not `fenced` may
         let such a write through within the gap that it documents.
      6. A write of an epoch higher than the installed one ends in `Terminal`: the store has lost
         the epoch since, so it was emptied or replaced by an older copy while the flow ran.

    States
      7. `load` returns the states that exist among `keys`; the others are missing in the result.
         A key may be any bytes, the empty key included, up to the limit in `capabilities`.
      8. What `save` acknowledged, every later `load` of any handle returns, until it is replaced.
      9. `save` replaces a state if and only if its version is the `expected` one; the version
         then becomes `expected + 1`. 0 stands for "no state". Value, version, epoch and batch
         change together: a reader sees all of the old or all of the new.
     10. The same write again (same epoch, batch and value, found at version `expected + 1`)
         succeeds and changes nothing: a retried task does no harm.
     11. If a stored state carries a higher epoch than the writer's: `Fenced`, before anything else.
     12. If any other state has another version: `Conflict` with exactly those keys. Whether the
         writes of the call that did not conflict take effect is the capability `atomic_save`:
         with it none does, without it each does or does not, as a whole.
     13. A call may have any number of writes; the store divides them as it needs. Without writes
         it does nothing. The same key twice in one call is a ValueError and nothing is written.
     14. An unknown outcome (a timeout, a cut connection) is resolved by reading back, never by
         a blind second write. Where that fails as well the call raises `Transient`: the writes
         then did or did not take effect, each as a whole.
     15. States of different stages, generations and flows never touch.
     16. `scan` yields every state that exists during the whole scan exactly once, as a stream.
         States written meanwhile may be missing.

    Manifests
     17. `load_manifest` returns the manifest last saved, equal to what was given, or None.
     18. `save_manifest` follows 5 and 6 with the manifest's own epoch. Within an epoch the batch
         never goes back: a lower one ends in `Fenced`. The same again succeeds.

    Marks, of a store that is `marked` (`persistence.marks`)
     23. The states of a stage lie in buckets, and `save` returns the mark of each bucket that it came to. A save that
         changes a state raises its bucket's mark in the same atomic step; one that changes nothing leaves it.
     24. A `save` with a known mark that its bucket does not hold ends in `StoreWentBack` and changes nothing in
         that bucket. A bucket that is ahead of the known mark is no error.
     25. `marks` returns every bucket of a stage, with its mark and with what the last save that changed it gave as
         `downstream`.
     26. `save_manifest` with `after` ends in `StoreWentBack` and changes nothing if the manifest in the store is older.

    All
     19. What was acknowledged survives the death of the client (kill -9), and of the server
         and of the machine when `capabilities.durable`.
     20. A handle may be used by several threads, and after a fork by the child as well as by the parent.
     21. `close` releases connections; again it does nothing. It never waits for the network.
     22. Every failure is one of `persistence.errors`; no message has a secret, a state or a payload in it.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do beyond the contract."""
        ...

    def acquire_epoch(self, flow: FlowRef, *, above: int = 0) -> int:
        """Begin a run: return a new epoch, already installed here.

        Args:
            flow: The flow that begins to run.
            above: Highest epoch known from other stores. It matters when this one, the authority
                for epochs, was restored from an older copy.
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
        """Return the states of `keys`; keys without a state are not in it."""
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
        """Replace states, each on condition of the version that was loaded.

        Args:
            stage: The stage.
            writes: The new states.
            epoch: Epoch of the run.
            batch: Number of the batch within the run.
            known: Marks that the stage's buckets are known to have reached.
            downstream: What the stages behind this one have acknowledged, to be kept with the states.

        Returns:
            The mark of each bucket that was written to; empty for a store that is not `marked`.

        Raises:
            StoreWentBack: A bucket does not hold the mark that is known of it.
            Fenced: A higher epoch is installed, or one of the states was written by one.
            Conflict: Some states have changed since they were loaded.
            Terminal: The store does not know this epoch, or a key or value is too long.
            ValueError: The same key twice.
        """
        ...

    def marks(self, stage: StageRef) -> Mapping[str, Bucket]:
        """Return what stands beside the states of each bucket of a stage; empty for a store that is not `marked`."""
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
            after: Epoch and batch of the manifest that is known to be there.

        Raises:
            StoreWentBack: The manifest that is there is older than that.
            Fenced: A higher epoch is installed, or a later batch of this epoch has been saved.
        """
        ...

    def scan(self, stage: StageRef) -> Iterator[tuple[bytes, Stored]]:
        """Yield every state of a stage."""
        ...

    def close(self) -> None:
        """Release connections. May be called again."""
        ...

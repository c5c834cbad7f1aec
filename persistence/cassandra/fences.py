"""The fence of a bucket: the only epoch that may write there.

The installed epoch is in the flow's partition, where a transaction on a bucket cannot read it. So every
bucket stores a copy, the fence, in a static column, and each conditional write compares it in the same
step. Installing an epoch raises the fence of every bucket of every stage. After that, a write of an older
run, however late it arrives, finds the raised fence and changes nothing (Cassandra orders the transactions
of a partition).

If a writer finds a fence lower than its own epoch (the stage is new, or an installation did not complete),
it reads the installed epoch and then raises the fence itself. A newer epoch may be installed between the
two steps, but then its fence is or will be in the bucket, and fences only rise.

If the fence of a bucket has disappeared, the bucket was emptied and its states are lost: the flow stops.
"""

from functools import partial

from persistence.cas import check_epoch
from persistence.cassandra.client import Client
from persistence.cassandra.flows import Flows
from persistence.commit.faults import FENCE, effect
from persistence.errors import Fenced, Terminal
from persistence.names import StageRef


class Fences:
    """Raises and checks fences."""

    def __init__(self, client: Client, flows: Flows) -> None:
        self._client = client
        self._flows = flows

    def raise_all(self, stage: StageRef, buckets: int, epoch: int, before: int) -> None:
        """Raise the fences of a stage; higher fences stay.

        Args:
            stage: The stage.
            buckets: Its number of buckets.
            epoch: The new fence.
            before: Their probable current value, below `epoch`; a wrong guess costs a second round.

        Raises:
            Terminal: A bucket was emptied.
        """
        self._client.together(stage, [partial(self._raise, stage, bucket, epoch, before) for bucket in range(buckets)])

    def check(self, stage: StageRef, bucket: int, epoch: int, *, serial: bool = True) -> bool:
        """Whether a writer of `epoch` may write; raise the fence if it is lower than the installed `epoch`.

        Args:
            stage: The stage.
            bucket: The bucket.
            epoch: The writer's epoch.
            serial: Read the fence at the serial consistency.

        Returns:
            Whether the fence now is the epoch.

        Raises:
            Fenced: A higher epoch is installed.
            Terminal: The store does not know the writer's epoch, or the bucket was emptied.
        """
        fence = self._read(stage, bucket, serial=serial)
        if fence > epoch:
            raise Fenced.by(stage, epoch, fence)
        if fence == epoch:
            return True
        check_epoch(stage, epoch, self._flows.installed_epoch(stage.flow_ref))
        if not fence:
            self._check_present(stage, bucket)
        return self._raise(stage, bucket, epoch, fence) == epoch

    def _raise(self, stage: StageRef, bucket: int, epoch: int, found: int) -> int:
        """Raise one fence and return its new value."""
        while found < epoch:
            statement = self._client.live(stage).statements.set_fence(stage, bucket, epoch, found)
            applied, now = self._client.retried(
                lambda: effect(FENCE, lambda: self._client.applied(stage, statement))  # noqa: B023
            )
            found = epoch if applied else now.get("fence") or 0
            if not found:
                self._check_present(stage, bucket)
        return found

    def _check_present(self, stage: StageRef, bucket: int) -> None:
        """Refuse a bucket without a fence, unless its stage is new."""
        # Read the layout first: another writer may have set the fence since it was found missing.
        layout = self._flows.layouts(stage.flow_ref).get(stage.stage)
        if layout and layout.fenced and not self._read(stage, bucket, serial=True):
            raise Terminal(
                f"bucket {bucket} has been emptied: its fence and its states are missing",
                "Restore the table from a copy, or rebuild the flow into a new generation (`headwater run --generation`)",
                ref=stage,
            )

    def _read(self, stage: StageRef, bucket: int, *, serial: bool) -> int:
        """A bucket's fence, 0 if it has none."""
        statement = self._client.live(stage).statements.fence(stage, bucket)
        rows = self._client.retried(lambda: self._client.rows(stage, statement, serial=serial))
        return (rows[0][0] if rows else None) or 0

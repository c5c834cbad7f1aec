"""The fence of a bucket: the one epoch whose runs may write there.

The installed epoch stands in the flow's partition; a transaction on a bucket cannot see it. So every
bucket has a copy, the fence, as a static column, and each conditional write compares it in the
step that writes. Installing an epoch raises the fence of every bucket of every stage: when
that has returned, a write of an older run that is still on its way, however late, finds the
fence raised and changes nothing (the transactions of one partition are in one order).

A writer that finds a lower fence than its own epoch (a stage that has just begun, or an install that
died half-way) raises it itself, after a look at the installed epoch. Between that look and the raise
a newer epoch may be installed; but then its fence is in the bucket or will be, and fences only rise.

A bucket that had a fence and has none was emptied, and its states are gone with it: that stops the flow.
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
        """Raise the fences of a stage, those that are higher excepted.

        Args:
            stage: The stage.
            buckets: How many it has.
            epoch: The new fence.
            before: What they most likely are, below `epoch`; a wrong guess costs a second round.

        Raises:
            Terminal: A bucket was emptied.
        """
        self._client.together(stage, [partial(self._raise, stage, bucket, epoch, before) for bucket in range(buckets)])

    def check(self, stage: StageRef, bucket: int, epoch: int, *, serial: bool = True) -> bool:
        """Whether a writer of `epoch` may write; raise the fence to it if that is all that is missing.

        Args:
            stage: The stage.
            bucket: The bucket.
            epoch: The writer's epoch.
            serial: Read the fence at the serial consistency.

        Returns:
            True when the fence is the epoch now.

        Raises:
            Fenced: A higher epoch is installed.
            Terminal: The writer's epoch is not known here, or the bucket was emptied.
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
        """Raise one fence and return what it is then."""
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
        """Whether a bucket has no fence because its stage has just begun."""
        # In this order: the fence may have been set after the look that found none.
        layout = self._flows.layouts(stage.flow_ref).get(stage.stage)
        if layout and layout.fenced and not self._read(stage, bucket, serial=True):
            raise Terminal(
                f"bucket {bucket} has been emptied: its fence is gone, and its states with it",
                "Restore the table from a copy, or rebuild the flow into a new generation (`headwater run --generation`)",
                at=stage,
            )

    def _read(self, stage: StageRef, bucket: int, *, serial: bool) -> int:
        """A bucket's fence, 0 when there is none."""
        statement = self._client.live(stage).statements.fence(stage, bucket)
        rows = self._client.retried(lambda: self._client.rows(stage, statement, serial=serial))
        return (rows[0][0] if rows else None) or 0

"""Installs an epoch: first in the flow's partition, then as the fence of every bucket."""

from persistence.cas import check_epoch, check_is_epoch
from persistence.cassandra.fences import Fences
from persistence.cassandra.flows import CassandraLayout, Flows
from persistence.cassandra.settings import CassandraSettings
from persistence.errors import Fenced, Terminal
from persistence.names import FlowRef, StageRef


class Epochs:
    """Installs epochs, and registers stages.

    The flow's partition orders both. If a stage is registered before an epoch is installed, the installation raises
    its fences. If it is registered after, the registration is refused, because its epoch is lower.
    """

    def __init__(self, flows: Flows, fences: Fences, settings: CassandraSettings) -> None:
        self._flows = flows
        self._fences = fences
        self._layout = CassandraLayout(settings.buckets, settings.mode)

    def acquire(self, flow: FlowRef, above: int) -> int:
        """Install and return an epoch higher than the installed one and than `above`."""
        found = self._flows.installed_epoch(flow)
        while True:
            epoch = max(found, above) + 1
            applied, now = self._flows.set_epoch(flow, epoch, found)
            if applied:
                self._fence(flow, epoch, found)
                return epoch
            # Another run installed it, or the answer to this run's write was lost; that number is skipped.
            found = now

    def install(self, flow: FlowRef, epoch: int) -> None:
        """Install `epoch`.

        Raises:
            Fenced: A higher epoch is installed.
        """
        check_is_epoch(flow, epoch)
        found, before = self._flows.installed_epoch(flow), 0
        while found < epoch:
            before = found
            applied, now = self._flows.set_epoch(flow, epoch, found)
            found = epoch if applied else now
        if found > epoch:
            raise Fenced.by(flow, epoch, found)
        # Even if it was installed already: that process may have died before the last fence was raised.
        self._fence(flow, epoch, before)

    def begin(self, stage: StageRef, epoch: int) -> CassandraLayout:
        """The layout of a stage before a write; the first writer sets it.

        Raises:
            Fenced: A higher epoch is installed.
            Terminal: The store does not know the epoch, or the stage uses the other mode.
        """
        layout = self._flows.layout(stage)
        while layout is None:
            applied, installed = self._flows.add_stage(stage, self._layout, epoch)
            if applied:
                self._fence_stage(stage, self._layout, epoch, 0)
            else:
                check_epoch(stage, epoch, installed)
            layout = self._flows.layout(stage)
        if layout.mode != self._layout.mode:
            raise Terminal(
                f"the stage was created with mode={layout.mode}, the URL has mode={self._layout.mode}",
                f"Set mode={layout.mode}, or rebuild the flow into a new generation: the modes order writes by "
                "different clocks",
                ref=stage,
            )
        return layout

    def _fence(self, flow: FlowRef, epoch: int, before: int) -> None:
        for name, layout in self._flows.layouts(flow).items():
            self._fence_stage(flow.stage(name), layout, epoch, before)

    def _fence_stage(self, stage: StageRef, layout: CassandraLayout, epoch: int, before: int) -> None:
        self._fences.raise_all(stage, layout.buckets, epoch, before)
        if not layout.fenced:
            self._flows.set_fenced(stage, epoch)

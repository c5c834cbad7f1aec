"""Data of a flow as a whole: its epoch, its manifest, and the layout of its stages.

All of it is in one partition, so the epoch is compared in the transaction that writes the rest. Everything is read at
the serial consistency: the data is small, and such a read completes an unfinished transaction.
"""

from dataclasses import dataclass
from typing import Any

from persistence.cas import check_manifest
from persistence.cassandra.client import Client
from persistence.manifest import Manifest, decode_manifest, encode_manifest
from persistence.names import FlowRef, StageRef


@dataclass(frozen=True, slots=True)
class CassandraLayout:
    """How the states of a stage are stored. The first write sets it; later URLs do not change it.

    Attributes:
        buckets: Number of partitions for the states.
        mode: How they are written.
        fenced: Every bucket has had its fence; a bucket without one has been emptied since.
        indexed: Every state with a due time is in the index of its bucket.
    """

    buckets: int
    mode: str
    fenced: bool = False
    indexed: bool = False


class Flows:
    """The partitions of flows. Every write is a transaction that may safely be sent again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._layouts: dict[StageRef, CassandraLayout] = {}

    def installed_epoch(self, flow: FlowRef) -> int:
        """The installed epoch, 0 if there is none."""
        return self._read(flow)[0]

    def set_epoch(self, flow: FlowRef, epoch: int, found: int) -> tuple[bool, int]:
        """Install `epoch` if the installed one is `found`; return whether it was, and the installed one if not."""
        applied, now = self._write(flow, self._client.live(flow).statements.set_epoch(flow, epoch, found))
        return applied, now.get("epoch") or 0

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        """The manifest, None if there is none."""
        text = self._read(flow)[1]
        return None if text is None else decode_manifest(text.encode(), flow)

    def save_manifest(self, flow: FlowRef, manifest: Manifest, after: tuple[int, int]) -> None:
        """Replace the manifest if the epoch and the previous manifest match."""
        wanted = encode_manifest(manifest).decode()
        while True:
            epoch, found = self._read(flow)
            newest = None if found is None else decode_manifest(found.encode(), flow)
            check_manifest(flow, manifest, newest, epoch, after)
            if found == wanted:
                return
            # Sent again after a lost answer, it finds `wanted` and changes nothing; the next iteration detects that.
            statement = self._client.live(flow).statements.set_manifest(flow, wanted, manifest.epoch, found)
            if self._write(flow, statement)[0]:
                return

    def layout(self, stage: StageRef) -> CassandraLayout | None:
        """The layout of a stage, None if it has never been written to."""
        if stage not in self._layouts:
            for name, layout in self.layouts(stage.flow_ref).items():
                self._layouts[stage.flow_ref.stage(name)] = layout
        return self._layouts.get(stage)

    def layouts(self, flow: FlowRef) -> dict[str, CassandraLayout]:
        """The current layout of every stage that has been written to."""
        statement = self._client.live(flow).statements.stages(flow)
        rows = self._client.retried(lambda: self._client.rows(flow, statement, serial=True))
        return {
            name: CassandraLayout(buckets, mode, fenced is True, indexed is True)
            for name, buckets, mode, fenced, indexed in rows
            if buckets is not None
        }

    def add_stage(self, stage: StageRef, layout: CassandraLayout, epoch: int) -> tuple[bool, int]:
        """Register a new stage if `epoch` is installed; return whether it is, and the installed epoch if not."""
        statement = self._client.live(stage).statements.add_stage(stage, layout.buckets, layout.mode, epoch)
        applied, now = self._write(stage, statement)
        return applied, now.get("epoch") or 0

    def set_fenced(self, stage: StageRef, epoch: int, *, fenced: bool = True) -> None:
        """Record that every bucket has its fence, or may have none. If a newer epoch is installed, its run records it."""
        self._write(stage, self._client.live(stage).statements.set_fenced(stage, epoch, fenced=fenced))

    def drop_stage(self, stage: StageRef) -> None:
        """Remove the layout of a stage."""
        self._write(stage, self._client.live(stage).statements.drop_stage(stage))
        self._layouts.pop(stage, None)

    def drop(self, flow: FlowRef) -> None:
        """Remove the manifest, then the epoch, unless a newer epoch has been installed."""
        statements, (epoch, manifest) = self._client.live(flow).statements, self._read(flow)
        if manifest is not None:
            self._write(flow, statements.set_manifest(flow, None, epoch, manifest))
        if epoch:
            self._write(flow, statements.set_epoch(flow, None, epoch))

    def set_indexed(self, stage: StageRef, epoch: int) -> None:
        """Record that the index of a stage is complete. If a newer epoch is installed, its run completes it again."""
        self._write(stage, self._client.live(stage).statements.set_indexed(stage, epoch))
        self._layouts.pop(stage, None)

    def _read(self, flow: FlowRef) -> tuple[int, str | None]:
        """(installed epoch, manifest)."""
        statement = self._client.live(flow).statements.flow(flow)
        rows = self._client.retried(lambda: self._client.rows(flow, statement, serial=True))
        epoch, manifest = rows[0] if rows else (None, None)
        return epoch or 0, manifest

    def _write(self, ref: FlowRef | StageRef, statement: Any) -> tuple[bool, dict[str, Any]]:
        return self._client.retried(lambda: self._client.applied(ref, statement))

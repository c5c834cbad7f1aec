"""What a store knows of a flow as a whole: its term, its manifest, and how its stages are laid out.

All of it is one partition, so the term is compared in the transaction that writes the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass

from persistence.cas import check_is_term, check_manifest, check_term
from persistence.cassandra.client import Client
from persistence.cassandra.settings import Settings
from persistence.errors import Fenced, Terminal
from persistence.manifest import Manifest, decode_manifest, encode_manifest
from persistence.names import FlowRef, StageRef

Fencing = Callable[[StageRef, int, int, int], object]
"""(stage, buckets, term, term before): lets only writers of `term` into every bucket of a stage."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the states of a stage are kept, from its first write on, whatever a later URL says.

    Attributes:
        buckets: Partitions that they are spread over.
        mode: How they are written.
    """

    buckets: int
    mode: str


class Flows:
    """Terms, manifests and layouts, each read and written at the serial consistency.

    Args:
        client: Connections.
        fencing: Raises the fences of a stage's buckets.
    """

    def __init__(self, client: Client, fencing: Fencing) -> None:
        self._client = client
        self._settings: Settings = client.settings
        self._fencing = fencing
        self._layouts: dict[StageRef, Layout] = {}

    def acquire_term(self, flow: FlowRef, above: int) -> int:
        """Install a term that is higher than the installed one and than `above`, and return it."""
        found = self.installed_term(flow)
        while True:
            term = max(found, above) + 1
            applied, now = self._set_term(flow, term, found)
            if applied:
                self._fence_stages(flow, term, found)
                return term
            # Another run was faster, or this one was and the answer got lost: then the number is skipped.
            found = now

    def install_term(self, flow: FlowRef, term: int) -> None:
        """Install `term`, unless a higher one is."""
        check_is_term(flow, term)
        found = self.installed_term(flow)
        before = found
        while found < term:
            before = found
            applied, now = self._set_term(flow, term, found)
            found = term if applied else now
        if found > term:
            raise Fenced.by(flow, term, found)
        # Also when it was installed already: who did may have died before the last fence was raised.
        self._fence_stages(flow, term, before)

    def installed_term(self, flow: FlowRef) -> int:
        """The installed term, 0 when there is none."""
        return self._read(flow)[0]

    def load_manifest(self, flow: FlowRef) -> Manifest | None:
        """The manifest, None when there is none."""
        text = self._read(flow)[1]
        return None if text is None else decode_manifest(text.encode(), flow)

    def save_manifest(self, flow: FlowRef, manifest: Manifest) -> None:
        """Replace the manifest on condition of the term and of the manifest that it follows."""
        wanted = encode_manifest(manifest).decode()
        while True:
            term, found = self._read(flow)
            check_manifest(flow, manifest, None if found is None else decode_manifest(found.encode(), flow), term)
            if found == wanted:
                return
            # Tried again after a lost answer it finds `wanted` and changes nothing; the next turn sees that.
            statement = self._client.live(flow).statements.set_manifest(flow, wanted, manifest.term, found)
            applied, _ = self._client.retried(lambda: self._client.applied(flow, statement))  # noqa: B023
            if applied:
                return

    def layout(self, stage: StageRef) -> Layout | None:
        """How a stage is laid out, None when it has never been written to."""
        if stage not in self._layouts:
            for name, layout in self._read_layouts(stage.flow_ref).items():
                self._layouts[stage.flow_ref.stage(name)] = layout
        return self._layouts.get(stage)

    def begin(self, stage: StageRef, term: int) -> Layout:
        """The layout of a stage that is about to be written to; the first writer decides it.

        Raises:
            Fenced: A higher term is installed.
            Terminal: The term is not known here, or the stage began in the other mode.
        """
        layout = self.layout(stage)
        while layout is None:
            wanted = self._settings
            statement = self._client.live(stage).statements.add_stage(stage, wanted.buckets, wanted.mode, term)
            applied, found = self._client.retried(lambda: self._client.applied(stage, statement))  # noqa: B023
            if applied:
                self._fencing(stage, wanted.buckets, term, 0)
            else:
                check_term(stage, term, found.get("term") or 0)
            layout = self.layout(stage)
        if layout.mode != self._settings.mode:
            raise Terminal(
                f"it began with mode={layout.mode}, the URL says mode={self._settings.mode}",
                f"Say mode={layout.mode}, or rebuild the flow into a new generation: the two modes order writes "
                "by different clocks and would not see each other's",
                at=stage,
            )
        return layout

    def _read(self, flow: FlowRef) -> tuple[int, str | None]:
        """(installed term, manifest)."""
        rows = self._client.retried(
            lambda: self._client.rows(flow, self._client.live(flow).statements.flow(flow), serial=True)
        )
        term, manifest = rows[0] if rows else (None, None)
        return term or 0, manifest

    def _set_term(self, flow: FlowRef, term: int, found: int) -> tuple[bool, int]:
        """(whether it was installed, the installed one if not)."""
        statement = self._client.live(flow).statements.set_term(flow, term, found)
        applied, now = self._client.retried(lambda: self._client.applied(flow, statement))
        return applied, now.get("term") or 0

    def _fence_stages(self, flow: FlowRef, term: int, before: int) -> None:
        """Raise every fence of the flow. A stage that becomes known later finds the term in its transaction."""
        for name, layout in self._read_layouts(flow).items():
            self._fencing(flow.stage(name), layout.buckets, term, before)

    def _read_layouts(self, flow: FlowRef) -> dict[str, Layout]:
        rows = self._client.retried(
            lambda: self._client.rows(flow, self._client.live(flow).statements.stages(flow), serial=True)
        )
        return {name: Layout(buckets, mode) for name, buckets, mode in rows if buckets is not None}

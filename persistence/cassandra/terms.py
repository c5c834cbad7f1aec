"""Which run may write: a term is installed in the flow's partition first, then as the fence of every bucket."""

from persistence.cas import check_is_term, check_term
from persistence.cassandra.fences import Fences
from persistence.cassandra.flows import Flows, Layout
from persistence.cassandra.settings import Settings
from persistence.errors import Fenced, Terminal
from persistence.names import FlowRef, StageRef


class Terms:
    """Installs terms, and lets stages begin.

    Both are ordered by the flow's partition: a stage that becomes known before a term is installed is in the list of
    those whose fences are raised then; one that would become known after it finds its own term refused.
    """

    def __init__(self, flows: Flows, fences: Fences, settings: Settings) -> None:
        self._flows = flows
        self._fences = fences
        self._layout = Layout(settings.buckets, settings.mode)

    def acquire(self, flow: FlowRef, above: int) -> int:
        """Install a term that is higher than the installed one and than `above`, and return it."""
        found = self._flows.installed_term(flow)
        while True:
            term = max(found, above) + 1
            applied, now = self._flows.set_term(flow, term, found)
            if applied:
                self._fence(flow, term, found)
                return term
            # Another run was faster, or this one was and the answer got lost: then the number is skipped.
            found = now

    def install(self, flow: FlowRef, term: int) -> None:
        """Install `term`.

        Raises:
            Fenced: A higher one is installed.
        """
        check_is_term(flow, term)
        found, before = self._flows.installed_term(flow), 0
        while found < term:
            before = found
            applied, now = self._flows.set_term(flow, term, found)
            found = term if applied else now
        if found > term:
            raise Fenced.by(flow, term, found)
        # Also when it was installed already: who did it may have died before the last fence was raised.
        self._fence(flow, term, before)

    def begin(self, stage: StageRef, term: int) -> Layout:
        """The layout of a stage that is about to be written to; the first writer decides it.

        Raises:
            Fenced: A higher term is installed.
            Terminal: The term is not known here, or the stage began in the other mode.
        """
        layout = self._flows.layout(stage)
        while layout is None:
            applied, installed = self._flows.add_stage(stage, self._layout, term)
            if applied:
                self._fence_stage(stage, self._layout, term, 0)
            else:
                check_term(stage, term, installed)
            layout = self._flows.layout(stage)
        if layout.mode != self._layout.mode:
            raise Terminal(
                f"the stage began with mode={layout.mode}, the URL says mode={self._layout.mode}",
                f"Say mode={layout.mode}, or rebuild the flow into a new generation: the modes order writes by "
                "different clocks",
                at=stage,
            )
        return layout

    def _fence(self, flow: FlowRef, term: int, before: int) -> None:
        for name, layout in self._flows.layouts(flow).items():
            self._fence_stage(flow.stage(name), layout, term, before)

    def _fence_stage(self, stage: StageRef, layout: Layout, term: int, before: int) -> None:
        self._fences.raise_all(stage, layout.buckets, term, before)
        if not layout.fenced:
            self._flows.set_fenced(stage, term)

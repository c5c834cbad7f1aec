"""Results of the commands that rebuild and swap generations."""

from dataclasses import dataclass, field
from typing import Any

from aggregations.report import Report
from jobs.comparing import Comparison


@dataclass(slots=True)
class Replayed:
    """Result of a rebuild.

    Attributes:
        flow: Name of the flow.
        generation: The generation that was rebuilt.
        live: The live generation.
        report: Counts of what was folded by this command. Outputs were not sent; dead letters are held.
        behind: Offsets that the live generation has folded since, and the rebuild has not.
    """

    flow: str
    generation: int
    live: int
    report: Report = field(default_factory=Report)
    behind: int = 0

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "flow": self.flow,
            "generation": self.generation,
            "live": self.live,
            "records": self.report.records,
            "batches": self.report.batches,
            "dead_letters": dict(self.report.reasons),
            "outputs": self.report.outputs,
            "behind": self.behind,
        }


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between two generations that have folded the same records.

    Attributes:
        comparison: Differences by stage.
        uncompared: Stages that were not compared: their definition differs, and the old one is not known.
    """

    comparison: Comparison
    uncompared: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The differences as a JSON object."""
        return {"stages": self.comparison.as_json(), "uncompared": list(self.uncompared)}


@dataclass(slots=True)
class Swapped:
    """Result of a swap.

    Attributes:
        flow: Name of the flow.
        live: The generation that is live now.
        previous: The generation that was live before.
        done: Whether they were swapped; False if the differences were declined.
        report: Counts of what the rebuild folded by this command.
        differences: The differences between the two, of the same records.
        dead_letters: Held dead letters that were sent.
        states: States that were published (`publish_states`).
        outputs: Held outputs that were sent: those of publish steps, and states of windows that have closed.
        dropped: Held dead letters that were dropped.
    """

    flow: str
    live: int
    previous: int
    done: bool
    report: Report
    differences: Differences
    dead_letters: int = 0
    states: int = 0
    outputs: int = 0
    dropped: int = 0

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "flow": self.flow,
            "live": self.live,
            "previous": self.previous,
            "swapped": self.done,
            "records": self.report.records,
            "differences": self.differences.as_json(),
            "dead_letters": self.dead_letters,
            "states": self.states,
            "outputs": self.outputs,
            "dropped": self.dropped,
        }

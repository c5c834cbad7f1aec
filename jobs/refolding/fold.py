"""Folds history into embedded stores of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from aggregations.definition.flow import Flow
from aggregations.engine.options import RunOptions
from aggregations.local import fold_range
from aggregations.report import Report
from aggregations.run.binding import bind
from aggregations.run.risks import check_accept
from envelope import TopicPartition
from jobs.refolding.history import History
from persistence.urls import embedded

WORK: Final = Path(".headwater/folds")
"""Where states are folded into, by default."""


class Told(Protocol):
    """Is told of progress."""

    def __call__(self, what: str, done: int, total: int | None, /) -> None:
        """Take what is counted, how much of it is done, and the total if it is known."""


def silent(_what: str, _done: int, _total: int | None) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Folded:
    """What a fold of history did.

    Attributes:
        records: Records read.
        dead_letters: Number of dead letters by reason code; none was sent.
        outputs: Number of messages that a run would have published; none was sent.
        states: Number of states read for the comparison, by stage.
    """

    records: int
    dead_letters: dict[str, int]
    outputs: int
    states: dict[str, int]

    @classmethod
    def of(cls, report: Report, states: Mapping[str, int]) -> "Folded":
        """The counts of a report, and numbers of states."""
        letters = {reason: count for reason, count in sorted(report.reasons.items()) if count}
        return cls(report.records, letters, report.outputs, dict(states))

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object."""
        return asdict(self)


def own_stores(flow: Flow[Any], directory: Path) -> dict[str, str]:
    """URL of one embedded store for all stages, by stage name. It need not survive a loss of power."""
    return bind(flow, dict.fromkeys(flow.stage_names, f"{embedded('lmdb', directory)}?sync=nosync"))


def fold(
    flow: Flow[Any],
    history: History,
    options: RunOptions,
    *,
    what: str,
    progress: Told,
    turns: Sequence[Mapping[TopicPartition, int]] = (),
) -> Report:
    """Fold history into stores.

    Args:
        flow: The flow.
        history: What is read. Of topics that the stores have positions of, only its end counts.
        options: Cluster, stores by stage name, generation and accepted risks.
        what: What is counted, for `progress`.
        progress: Is told of the records read.
        turns: The ends of the turns that tables and sources take, without the last (`jobs.refolding.turns`).

    Raises:
        FlowError: A risk does not exist.
    """
    check_accept(flow.name, options.urls, options.accept)
    starts, ends = history.starts(flow), history.ends(flow)
    total, done = sum(end - starts[topic][partition] for (topic, partition), end in ends.items()), 0

    def told(report: Report) -> None:
        nonlocal done
        done += report.records
        progress(what, done, total)

    return fold_range(flow, replace(options, start=starts), ends=ends, turns=turns, progress=told)

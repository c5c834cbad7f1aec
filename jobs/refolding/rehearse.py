"""Folds recorded history with two definitions of a flow, and compares the states."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.engine.archived import topics_with_archive
from aggregations.engine.options import RunOptions
from aggregations.run.begin import look
from aggregations.run.border import removed_by_stage
from jobs.comparing import SAMPLE, Comparison, compare
from jobs.explaining.log import Reader
from jobs.refolding.fold import WORK, Folded, Told, fold, own_stores, silent
from jobs.refolding.history import History, chosen
from jobs.refolding.rows import Rows, check_met, chosen_stages, latest_removal, states_of
from jobs.refolding.workspace import workspace


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        flow: Name of the flow.
        history: What was read.
        old: The fold with the old definition.
        new: The fold with the new definition.
        comparison: Differences of the states.
    """

    flow: str
    history: History
    old: Folded
    new: Folded
    comparison: Comparison

    @property
    def differs(self) -> bool:
        """Whether states, dead letters or the number of outputs differ."""
        counts = [(one.dead_letters, one.outputs) for one in (self.old, self.new)]
        return bool(self.comparison.differences) or counts[0] != counts[1]

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "flow": self.flow,
            "ranges": self.history.as_json(),
            "archived": self.history.archived,
            "old": self.old.as_json(),
            "new": self.new.as_json(),
            "stages": self.comparison.as_json(),
            "differs": self.differs,
        }


def rehearse(
    flow: Flow[Any],
    against: Flow[Any],
    options: RunOptions,
    *,
    ranges: Sequence[str] = (),
    stages: Sequence[str] = (),
    keys: Sequence[bytes] = (),
    sample: int = SAMPLE,
    work: Path = WORK,
    progress: Told = silent,
) -> Rehearsal:
    """Fold the same recorded history with two definitions, and compare the states, dead letters and outputs.

    Both folds read Kafka, and write only into a directory that is deleted afterwards. Nothing is sent, no group offsets
    are written, and the stores of the flow are not opened.

    Args:
        flow: The flow with the new definition.
        against: The flow with the old definition.
        options: Cluster, accepted risks, and generation of the live states, None for 1: redriven dead letters of another one
            are copies.
        ranges: What is read, as for `chosen`; all that the topics have if there is none.
        stages: Only states of these stages are compared; all if there is none.
        keys: Only these keys of the stages are compared, in all windows; all if there is none.
        sample: Differences of each stage that are kept.
        work: Directory for the states of both folds while they are compared.
        progress: Is told of progress.

    Raises:
        UsageError: A range is malformed, or the directory cannot be written.
        RunRefusedError: The topics do not have a range, neither flow has a stage or a key, or a source is compacted and
            the risk is not accepted.
        FlowError: A flow cannot work.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: The states cannot be written.
    """
    sides, generation = {"old": against, "new": flow}, options.generation or 1
    compared = chosen_stages(sides.values(), stages)
    with closing(Reader(options.broker, topics_with_archive(options, *sides.values()))) as reader:
        history = chosen(ranges, list(sides.values()), reader)
    with workspace(work) as directory, ExitStack() as opened:
        reports, runs = {}, {}
        for name, one in sides.items():
            stores = own_stores(one, directory / name)
            reports[name] = fold(
                one,
                history,
                replace(options, stores=stores, generation=generation),
                what=f"records folded with the {name} definition",
                progress=progress,
            )
            runs[name] = opened.enter_context(closing(look(one, stores, generation=generation)))
        gone = latest_removal(*map(removed_by_stage, runs.values()))
        wanted = frozenset(keys) or None
        old = Rows(against, flow, generation, gone=gone, keys=wanted)
        new = Rows(flow, against, generation, gone=gone, keys=wanted)
        comparison = compare(
            old.read(states_of(runs["old"], compared, directory / "old-copy")),
            new.read(states_of(runs["new"], compared, directory / "new-copy")),
            stages=compared,
            sample=sample,
            progress=lambda done, total: progress("states compared", done, total),
        )
    check_met(keys, old.met | new.met)
    return Rehearsal(
        flow.name, history, Folded.of(reports["old"], old.states), Folded.of(reports["new"], new.states), comparison
    )

"""Folds a flow's history again, and compares the states with the live ones."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from aggregations.definition.flow import Flow
from aggregations.engine.archived import topics_with_archive
from aggregations.engine.options import RunOptions
from aggregations.errors import RunRefusedError
from aggregations.per_message.ledger import hole_at, outputs_before
from aggregations.run.begin import look
from aggregations.run.border import check_border, check_unchanged, removed_by_stage
from aggregations.run.live import live_generation
from aggregations.run.run import Run
from aggregations.run.unproven import unproven_apart
from jobs.comparing import SAMPLE, Comparison, compare
from jobs.explaining.log import Reader
from jobs.refolding.begin import look_at_live, restored
from jobs.refolding.fold import WORK, Folded, Told, fold, own_stores, silent
from jobs.refolding.history import History, recorded
from jobs.refolding.ordered import OrderedCopy, State
from jobs.refolding.rows import Rows, check_met, chosen_stages, latest_removal, states_of
from jobs.refolding.turns import Ends, TurnsUnknownError, recorded_turns, spanned
from jobs.refolding.workspace import workspace
from jobs.snapshot_places import Place, shown
from persistence.manifest import Manifest

_WHAT: Final = "compare the states of one moment"


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit.

    Attributes:
        flow: Name of the flow.
        generation: Generation of the states.
        batch: Batch that the live states are of.
        snapshot: The snapshot that the fold began with; None for the flow's start.
        history: What was read.
        live: Number of live states that were compared, by stage.
        folded: The fold.
        holes: Number of holes that dead letters left in states, by stage: in the live states, and in those of the fold.
        listed: Number of dead letters in the ledger, of the live states and of the fold.
        skipped: Stages that were not compared, because they are behind a lookup.
        comparison: Differences of the states: the old ones are the live ones.
        unknown: Why stages were skipped; empty if none was.
        unproven: Number of redriven or retried messages that the fold found unproven, and that live states may have
            folded in batches that ended elsewhere: differences may be due to these, and no drift.
    """

    flow: str
    generation: int
    batch: int
    snapshot: Place | None
    history: History
    live: dict[str, int]
    folded: Folded
    holes: dict[str, tuple[int, int]]
    listed: tuple[int, int]
    skipped: tuple[str, ...]
    comparison: Comparison
    unknown: str = ""
    unproven: int = 0

    @property
    def drifted(self) -> bool:
        """Whether live states differ from those of the fold."""
        return bool(self.comparison.differences)

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "flow": self.flow,
            "generation": self.generation,
            "batch": self.batch,
            "snapshot": None if self.snapshot is None else shown(self.snapshot),
            "ranges": self.history.as_json(),
            "archived": self.history.archived,
            "live": self.live,
            "folded": self.folded.as_json(),
            "holes": {stage: list(both) for stage, both in self.holes.items()},
            "listed": list(self.listed),
            "skipped": list(self.skipped),
            "unknown": self.unknown,
            "unproven": self.unproven,
            "stages": self.comparison.as_json(),
            "drifted": self.drifted,
        }


def audit(
    flow: Flow[Any],
    options: RunOptions,
    *,
    snapshot: Place | None = None,
    stages: Sequence[str] = (),
    keys: Sequence[bytes] = (),
    sample: int = SAMPLE,
    work: Path = WORK,
    progress: Told = silent,
) -> Audit:
    """Fold what a flow has read once more, from its start or a snapshot, and compare the states with the live ones.

    The live states are copied first; no run may be at work until then. Nothing is written into the stores, nothing is
    sent, and no group offsets are written.

    Args:
        flow: The flow, with the definition that made the states.
        options: Options of its runs: cluster, stores, generation, accepted risks, and the journal, which shows the rows that
            lookups found.
        snapshot: File of `headwater snapshot` to begin with; None for the flow's start.
        stages: Only states of these stages are compared. If there is none, all are, except those behind a lookup if it is
            not known which rows they found, and those from a filter over all partitions on: which of two duplicates came
            first depends on the batches.
        keys: Only these keys of the stages are compared, in all windows; all if there is none.
        sample: Differences of each stage that are kept.
        work: Directory for the copy and the states of the fold.
        progress: Is told of progress.

    Raises:
        UsageError: The snapshot cannot be read, or the directory cannot be written.
        RunRefusedError: A run is at work, or did not end cleanly; the flow's definition has changed; its start is unknown
            or no longer in the log; the snapshot does not belong to it; a stage or a key does not exist; no stage is left
            to compare.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or refuses a request.
    """
    if not flow.stages:
        raise RunRefusedError(f"flow {flow.name} has no stage, so it keeps no states to compare")
    options = options.bound(flow)
    if (generation := options.generation) is None:
        generation = live_generation(flow, options.urls)
    compared = chosen_stages([flow], stages)
    behind = [stage.name for stage in flow.stages if stage.looks_up]
    judged = spanned(flow)
    turns, unknown = list[Ends](), list[str]()
    with workspace(work) as directory:
        own = own_stores(flow, directory / "states")
        begun = restored(flow, own, snapshot, generation)
        with (
            closing(look_at_live(flow, options.urls, generation)) as run,
            closing(Reader(options.broker, topics_with_archive(options, flow))) as reader,
        ):
            manifest = check_border(run, _WHAT)
            history = recorded(flow, manifest, begun, reader)
            if behind:
                try:
                    turns = recorded_turns(reader, options.journal, flow, generation, history)
                except TurnsUnknownError as error:
                    unknown = [f"it is not known which rows lookups found: {error}"]
            skipped = (
                [] if stages else [one for one in flow.stage_names if one in judged or (unknown and one in behind)]
            )
            if judged:
                unknown.append(f"which of two duplicates the filter {judged[0]} passes on depends on the batches")
            if not (compared := [name for name in compared if name not in skipped]):
                raise RunRefusedError(
                    f"flow {flow.name}: which of two duplicates its filter {judged[0]} passes on depends on the batches, so "
                    "states may differ although nothing is wrong. Name the stages to compare them all the same (--stage)"
                )
            copies = _copied(run, compared, directory / "live", progress)
            removed, ledger = removed_by_stage(run), run.ledger
            check_unchanged(run, _WHAT)
        report = fold(
            flow,
            history,
            replace(options, stores=own, generation=generation),
            what="records folded",
            progress=progress,
            turns=turns,
        )
        with closing(look(flow, own, generation=generation)) as folded:
            gone = latest_removal(removed, removed_by_stage(folded))
            old, new = (Rows(flow, flow, generation, gone=gone, keys=frozenset(keys) or None) for _ in range(2))
            comparison = compare(
                old.read(copies.items()),
                new.read(states_of(folded, compared, directory / "copy")),
                stages=compared,
                sample=sample,
                progress=lambda done, total: progress("states compared", done, total),
            )
            listed = _listed(manifest), _listed(folded.manifest)
            unproven = unproven_apart(flow, map(flow.stage, compared), ledger, folded.ledger, report)
    check_met(keys, old.met | new.met)
    return Audit(
        flow.name,
        generation,
        manifest.batch,
        snapshot,
        history,
        dict(old.states),
        Folded.of(report, new.states),
        {stage: (old.holes[stage], new.holes[stage]) for stage in compared},
        listed,
        tuple(skipped),
        comparison,
        "; ".join(unknown if skipped else ()),
        unproven,
    )


def _copied(run: Run, stages: Sequence[str], directory: Path, progress: Told) -> dict[str, OrderedCopy]:
    """A copy of the live states of each stage."""
    directory.mkdir()
    done = 0

    def read(stage: str) -> Iterator[State]:
        nonlocal done
        for key, stored in run.stores[stage].scan(run.ref.stage(stage)):
            yield key, stored.value
            done += 1
            if done % 1_000 == 0:
                progress("live states copied", done, None)

    return {stage: OrderedCopy(directory / str(number), read(stage)) for number, stage in enumerate(stages)}


def _listed(manifest: Manifest | None) -> int:
    """Number of dead letters in the ledger, without those whose outputs before a stage are missing as well."""
    found = manifest or Manifest(0, 0)
    beside = {name(stage) for stage in found.definitions for name in (outputs_before, hole_at)}
    places = [stage for stage in found.dead if stage not in beside]
    entries = (len(at) for stage in places for at in found.dead[stage].values())
    return sum(entries) + sum(found.forgotten.values())

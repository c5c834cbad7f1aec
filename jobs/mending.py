"""Mends states of chosen keys of one stage in place, by a new fold of the flow's history."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from aggregations.definition.flow import Flow, Stage
from aggregations.engine.archived import topics_with_archive
from aggregations.engine.options import RunOptions
from aggregations.errors import RunRefusedError
from aggregations.per_message.ledger import Ledger
from aggregations.report import Report
from aggregations.run.begin import look
from aggregations.run.border import removed_by_stage
from aggregations.run.mend import (
    Mend,
    Mending,
    check_can_mend,
    check_proven,
    check_waiting,
    chosen_states,
    mends_of,
    write_mends,
)
from aggregations.run.run import Run
from aggregations.run.snapshots import MendedSnapshot
from aggregations.run.states import states_in
from jobs.comparing import SAMPLE, Comparison, Likeness, Row, alike, compare
from jobs.explaining.log import Reader
from jobs.refolding.begin import look_at_live, restored
from jobs.refolding.fold import WORK, Folded, Told, fold, own_stores, silent
from jobs.refolding.history import History, recorded
from jobs.refolding.rows import Rows, check_met, chosen_stages, latest_removal
from jobs.refolding.turns import Ends, TurnsUnknownError, recorded_turns, spanned
from jobs.refolding.workspace import workspace
from jobs.replaying.author import Author
from jobs.replaying.folding import growths_of
from jobs.replaying.generations import Generations
from jobs.snapshot_places import Place, shown
from jobs.table.view import key_as_text
from persistence.commit.faults import MEND, effect
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from persistence.kafka.producer import COMMAND_BATCH_BYTES
from persistence.protocol import Stored

MENDS: Final = "mend states"
"""What is done, for errors."""
_NAMED: Final = 5
"""Keys that the note of a mend names."""


@dataclass(frozen=True, slots=True)
class Mended:
    """Result of a mend, or of its plan.

    Attributes:
        flow: Name of the flow.
        generation: The live generation.
        stage: Name of the stage.
        batch: Batch that the live states are of.
        snapshot: The snapshot that the fold began with; None for the flow's start.
        history: What was read.
        folded: The fold.
        comparison: Differences of the results: the old ones are the live ones.
        mends: What is done to each state that is not as it should be, by its key.
        applied: Whether it was done.
        later: Names of the stages that follow, which are left as they are.
        published: Number of messages with mended states that were sent (`publish_states`).
    """

    flow: str
    generation: int
    stage: str
    batch: int
    snapshot: Place | None
    history: History
    folded: Folded
    comparison: Comparison
    mends: dict[bytes, Mending]
    applied: bool
    later: tuple[str, ...] = ()
    published: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Number of states by what is done to them; those that are as they should be are not counted."""
        found = Counter(self.mends.values())
        return {one.value: found[one] for one in Mending}

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "flow": self.flow,
            "generation": self.generation,
            "stage": self.stage,
            "batch": self.batch,
            "snapshot": None if self.snapshot is None else shown(self.snapshot),
            "ranges": self.history.as_json(),
            "archived": self.history.archived,
            "folded": self.folded.as_json(),
            "stages": self.comparison.as_json(),
            "mends": self.counts,
            "applied": self.applied,
            "later": list(self.later),
            "published": self.published,
        }


def mend(
    flow: Flow[Any],
    options: RunOptions,
    *,
    stage: str,
    keys: Sequence[bytes],
    apply: bool = False,
    why: str = "",
    snapshot: Place | None = None,
    sample: int = SAMPLE,
    work: Path = WORK,
    progress: Told = silent,
) -> Mended:
    """Rebuild the states of some keys of one stage from the flow's history, compare them with the live ones, and mend these.

    The flow must be stopped. The history is folded from the flow's start or a snapshot up to where the live states end,
    and only states that are not as it makes them are written. Other stages are left as they are. After a crash at any
    point, repeat the call.

    Args:
        flow: The flow, with the definition that made the states.
        options: Options of its runs: cluster, stores, accepted risks, and the journal, for a stage behind a lookup. The
            generation must be the live one, or None for it.
        stage: Name of the stage.
        keys: Its keys, in all windows.
        apply: Write the mended states; otherwise only compare.
        why: The reason, for the audit.
        snapshot: File of `headwater snapshot` to begin with; None for the flow's start.
        sample: Differences that are kept.
        work: Directory for the states of the fold.
        progress: Is told of progress.

    Raises:
        UsageError: The snapshot cannot be read, or the directory cannot be written.
        RunRefusedError: A run is at work, or did not end cleanly; the flow's definition has changed; its start is unknown
            or no longer in the log; the stage or a key does not exist; or states of it cannot be mended.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or a run has begun meanwhile.
    """
    if not flow.stages:
        raise RunRefusedError(f"flow {flow.name} has no stage, so it keeps no states to mend")
    [name] = chosen_stages([flow], [stage])
    chosen, options = flow.stage(name), options.bound(flow)
    kafka = options.broker
    with workspace(work) as directory, closing(look_at_live(flow, options.urls, options.generation)) as run:
        manifest = check_can_mend(run, MENDS, lambda one: growths_of(one, kafka))
        own = own_stores(flow, directory / "states")
        begun = restored(flow, own, snapshot, run.ref.generation)
        with closing(Reader(kafka, topics_with_archive(options, flow))) as reader:
            history = recorded(flow, manifest, begun, reader)
            turns = _turns(reader, options.journal, run, chosen, history)
        report = fold(
            flow,
            history,
            replace(options, stores=own, generation=run.ref.generation),
            what="records folded",
            progress=progress,
            turns=turns,
        )
        with closing(look(flow, own, generation=run.ref.generation)) as folded:
            found = Sides.of(run, folded, report, chosen, keys)
        mends = found.mends(run.batch)
        published = 0
        if apply:
            published = apply_mends(
                *(run, chosen, mends),
                why=why,
                publish=lambda messages: effect(MEND, lambda: _send(kafka, messages)),
                largest=Topics(kafka).max_message_bytes(chosen.state_topics),
            )
    return Mended(
        flow.name,
        run.ref.generation,
        name,
        manifest.batch,
        snapshot,
        history,
        Folded.of(report, {name: len(found.folded)}),
        compare(found.old, found.new, stages=[name], sample=sample),
        {one.key: one.mending for one in mends},
        apply,
        tuple(one.name for one in flow.stages if one.index > chosen.index and one.name not in flow.tables),
        published,
    )


def _turns(reader: Reader, journal: str | None, run: Run, stage: Stage, history: History) -> list[Ends]:
    """The turns that make a stage behind a lookup find the rows that it found."""
    if stage.name in (judged := spanned(run.flow)):
        raise RunRefusedError(
            f"flow {run.flow.name}: which of two duplicates the filter {judged[0]} passes on depends on the batches, and stage "
            f"{stage.name} on the filter. Rebuild the flow with `headwater replay --apply`"
        )
    if not stage.looks_up:
        return []
    try:
        return recorded_turns(reader, journal, run.flow, run.ref.generation, history)
    except TurnsUnknownError as error:
        raise RunRefusedError(
            f"flow {run.flow.name}: stage {stage.name} is behind a lookup, and it is not known which rows it found: {error}. "
            "Rebuild the flow with `headwater replay --apply`"
        ) from error


def apply_mends(
    run: Run,
    stage: Stage,
    mends: Sequence[Mend],
    *,
    why: str,
    publish: Callable[[Sequence[MendedSnapshot]], Any],
    largest: Mapping[str, int] = {},
) -> int:
    """Write mended states, with a note in the pointer; see `write_mends`.

    Args:
        run: The run that `check_can_mend` checked.
        stage: The stage.
        mends: The mended states.
        why: The reason, for the audit.
        publish: Produces messages within the fault point `MEND`, and returns when all are acknowledged.
        largest: Largest record that can be produced to a topic, in bytes, by topic.

    Returns:
        Number of messages sent.
    """
    return write_mends(
        run,
        stage,
        mends,
        what=MENDS,
        note=lambda: _note(Generations(run.flow, run), stage.name, mends, why),
        publish=publish,
        largest=largest,
    )


@dataclass(frozen=True, slots=True)
class Sides:
    """Live states of some keys, and those of a fold of their history.

    Attributes:
        run: The run of the live states.
        stage: The stage.
        live: The live states as stored, by key.
        folded: Those of the fold.
        listed: The ledger of the fold.
        report: The counts of the fold.
        gone: Due time up to which states may have left either store, by stage, in seconds since 1970.
        old: The live states as readers see them.
        new: Those of the fold.
    """

    run: Run
    stage: Stage
    live: Mapping[bytes, Stored]
    folded: Mapping[bytes, Stored]
    listed: Ledger
    report: Report
    gone: Mapping[str, int]
    old: Sequence[Row]
    new: Sequence[Row]

    @classmethod
    def of(cls, run: Run, folded: Run, report: Report, stage: Stage, keys: Collection[bytes]) -> "Sides":
        """Read them.

        Raises:
            RunRefusedError: A key has a state on neither side.
        """
        gone = latest_removal(removed_by_stage(run), removed_by_stage(folded))
        chosen = frozenset(keys)

        def seen(states: Mapping[bytes, Stored]) -> list[Row]:
            rows = Rows(run.flow, run.flow, run.ref.generation, gone=gone, keys=chosen)
            found = [*rows.read([(stage.name, [(key, stored.value) for key, stored in states.items()])])]
            met.update(rows.met)
            return found

        met = set[bytes]()
        live, new = (chosen_states(one.stores[stage.name], one.stage_ref(stage), stage, keys) for one in (run, folded))
        made = cls(run, stage, live, new, folded.ledger, report, gone, seen(live), seen(new))
        check_met(list(keys), met)
        return made

    def mends(self, batch: int) -> list[Mend]:
        """What is done to them.

        Raises:
            RunRefusedError: The history folds a dead letter that waits, or may not fold what the live states have.
        """
        live, folded = (
            states_in(side, self.run.stage_ref(self.stage), self.stage, None) for side in (self.live, self.folded)
        )
        gone = self.gone.get(self.stage.name)
        found = mends_of(self.stage, live, folded, differing=self._differing(), gone=gone, batch=batch)
        mended = {one.key: folded[one.key] for one in found if one.key in folded}
        if found:
            check_proven(self.run.flow, self.stage, self.run.ledger, self.listed, self.report)
            check_waiting(self.run.flow, self.stage, self.run.ledger, self.listed, mended)
        return found

    def _differing(self) -> set[bytes]:
        """Keys whose results differ by more than rounding."""
        olds, news = ({row.key: row.seen for row in rows} for rows in (self.old, self.new))
        return {
            key
            for key in olds.keys() | news.keys()
            if (before := olds.get(key, {})).keys() != (after := news.get(key, {})).keys()
            or any(alike(one.compared, after[at].compared) is Likeness.DIFFERENT for at, one in before.items())
        }


def _note(found: Generations, stage: str, mends: Sequence[Mend], why: str) -> None:
    """Note in the pointer who mends what, when and why."""
    pointer, generation = found.settled(), found.run.ref.generation
    keys = [key_as_text(one.key) for one in mends[:_NAMED]]
    more = f" and {len(mends) - _NAMED} more" if len(mends) > _NAMED else ""
    change = msgspec.structs.replace(
        Author.here(why).change("mend", generation), states=f"stage {stage}, key {', '.join(keys)}{more}"
    )
    live = pointer.live if pointer.version else generation
    found.change(pointer, live=live, newest=max(pointer.newest, live), changes=pointer.noting(change).changes)


def _send(kafka: KafkaSettings, messages: Sequence[MendedSnapshot]) -> None:
    with closing(AcknowledgedProducer(kafka, batch_size=COMMAND_BATCH_BYTES)) as producer:
        for one in messages:
            producer.send(one.topic, one.value, one.key)
        producer.flush()

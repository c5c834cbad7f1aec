"""Discards dead letters: fills their holes and removes them from the ledger, without folding them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from aggregations.definition.element import Record
from aggregations.definition.flow import END_OF_FLOW, Flow
from aggregations.errors import RunRefusedError
from aggregations.run.begin import begin, look
from aggregations.run.discard import fill_holes
from aggregations.run.run import Run
from envelope import EnvelopeError, Node, Tombstones
from envelope.deadletter import DeadLetterHeaders
from jobs.dead_letters.letters import Handled, Letters, Selection, StoredDeadLetter
from jobs.dead_letters.redrive import hops_back, redriven
from persistence.errors import StoreError
from persistence.kafka import KafkaSettings

_BATCH = 1000


@dataclass(slots=True)
class Discarded(Handled):
    """Result of discarding: the holes of the dead letters are filled, and the ledger no longer lists them.

    Attributes:
        no_hole: Selected dead letters that are not missing (any more): they have no hole and no ledger entry.
    """

    no_hole: int = 0


def discard(
    settings: KafkaSettings,
    letters: str,
    flow: Flow[Any],
    stores: Mapping[str, str],
    *,
    generation: int | None = None,
    selection: Selection | None = None,
    apply: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Discarded:
    """Fill the holes of a flow's dead letters, without folding them.

    The dead letters stay in their topic; one that is redriven afterwards is not folded. Like any run, this acquires the
    flow's epoch: a run that is active at the same time ends with `Fenced`.

    Args:
        settings: Settings of the Kafka cluster.
        letters: The dead-letter topic.
        flow: The flow that rejected them.
        stores: URL of the store by stage name, from `aggregations.run.binding.bind`.
        generation: Generation of the states; None for the live one.
        selection: Which dead letters to discard; all of the flow when None.
        apply: Write the changes; otherwise only count them.
        progress: Called with the number of records read and their total.

    Returns:
        Counts. `left` includes dead letters of other flows; `unusable` are dead letters whose key can no longer be
        found.

    Raises:
        NotThereError: The flow has no stage or source that the selection names, and no dead letter is of it.
        BrokerError: Kafka cannot be reached, or refuses a request.
        StoreError: A store cannot be reached, or a newer run has begun.
        RunRefusedError: The stores have nothing of the flow, or are inconsistent with it.
    """
    found, selection = Letters(settings, letters), selection or Selection()
    selection.check(Letters(settings, letters), stages=(*flow.stage_names, END_OF_FLOW), topics=flow.topics)
    with closing(look(flow, stores, generation=generation)) as run:
        _check_ran(run)
    opened = begin(flow, stores, generation=generation) if apply else look(flow, stores, generation=generation)
    with closing(opened) as run:
        result = give_up(run, _counted(found, progress), selection=selection, apply=apply)
        if apply:
            with suppress(StoreError):  # the work is done; without a clean end the next run only doubts needlessly
                run.finish()
    return result


def give_up(run: Run, letters: Iterable[StoredDeadLetter], *, selection: Selection, apply: bool) -> Discarded:
    """Fill the holes of dead letters; see `discard`.

    Args:
        run: A run of the flow that rejected them; with `apply` it holds the epoch.
        letters: The dead letters, and others.
        selection: Which of them to discard.
        apply: Write the changes; otherwise only count them.

    Raises:
        StoreError: A store does not answer, or a newer run has begun.
    """
    result = Discarded()
    meant = _meant(letters, run, selection, result)
    while batch := dict(islice(meant, _BATCH)):
        # Items of one record may have been rejected at several stages: one dead letter for each.
        for stage in sorted({stage for stage, _ in batch}):
            letters_of = {node: letter for (at, node), letter in batch.items() if at == stage}
            _fill(run, letters_of, result, apply=apply)
    return result


def _counted(letters: Letters, progress: Callable[[int, int], None] | None) -> Iterator[StoredDeadLetter]:
    for done, letter in enumerate(letters, start=1):
        if progress is not None:
            progress(done, letters.total)
        yield letter
    if progress is not None:  # the notes of earlier redrives are not dead letters
        progress(letters.total, letters.total)


def _check_ran(run: Run) -> None:
    """Refuse stores in which the flow never began: they would be created, and have no hole."""
    if not any(manifest or run.stores[name].installed_epoch(run.ref) for name, manifest in run.manifests):
        raise RunRefusedError(
            f"{run.ref}: the stores contain nothing of it; if it ran with other stores, give --store; if it never ran, there "
            "is nothing to discard"
        )


def _meant(
    letters: Iterable[StoredDeadLetter], run: Run, selection: Selection, result: Discarded
) -> Iterator[tuple[tuple[str, Node], tuple[StoredDeadLetter, DeadLetterHeaders]]]:
    """The dead letters of one generation of a flow, by stage and original coordinates: a crash may write one twice.

    Those of a topic that the flow no longer reads beside others are left.
    """
    flow = run.flow
    for letter in letters:
        if (facts := letter.facts) is None:
            result.foreign += 1
            continue
        result.dead_letters += 1
        if not run.ledger.mine(facts) or not selection.takes(facts) or (flow.merges and facts.topic not in flow.topics):
            result.left += 1
        else:
            node = Node(facts.topic, facts.partition, facts.offset, facts.topic_id)
            yield (facts.stage, node), (letter, facts)


def _fill(
    run: Run, batch: Mapping[Node, tuple[StoredDeadLetter, DeadLetterHeaders]], result: Discarded, *, apply: bool
) -> None:
    records, unreadable, tombstones = [], {}, {}
    for node, (letter, facts) in batch.items():
        value = None
        try:
            takes_tombstones = run.flow.source_of(node.topic).tombstones is Tombstones.ELEMENT
            if letter.value is None and takes_tombstones:
                tombstones[node] = hops_back(facts, letter.place)
            else:
                value = redriven(letter.key, letter.value, letter.headers, facts, letter.place)
        except EnvelopeError as error:
            unreadable[node] = error
            continue
        stamp = facts.timestamp_ms or 0
        records.append(
            Record(
                node.topic, node.partition, node.offset, letter.key, value, stamp, tuple(letter.headers), node.topic_id
            )
        )
    found_of = fill_holes(run, records, unreadable=list(unreadable), tombstones=tombstones, apply=apply)
    for node, found in found_of.items():
        facts = batch[node][1]
        count = found or unreadable.get(node, found)
        if isinstance(count, EnvelopeError) and (facts.hole or node in unreadable):
            result.unusable[count.reason.value] += 1
        elif count and not isinstance(count, EnvelopeError):
            result.add(facts)
        else:
            result.no_hole += 1

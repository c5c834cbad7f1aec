"""Bugs of dead letters and their way back: whose a dead letter is, what of it is missing, and what steps make of a failure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.definition import stages
from aggregations.definition.flow import Divert
from aggregations.definition.operators import Branch
from aggregations.per_message import publishing, steps
from aggregations.per_message.dead_letters import DeadLetterCollector
from aggregations.per_message.ledger import Changes, Entry, Ledger
from aggregations.per_message.steps import Applied, RejectedElement
from envelope import Envelope, EnvelopeError, Reason, Route, encode
from envelope.redrive import Redrive, read_via
from jobs.dead_letters import redrive
from jobs.republish import processor
from tests.simulation.patch import Patch, original

_route = original(Ledger, "route")


def _takes_every_letter(self: Ledger, stage: str, standing: Any, back: Any, entries: Any) -> Route:
    return standing.route if back is None else Route.MISSING


def _retried(self: Ledger, *arguments: Any) -> Route:
    found: Route = _route(self, *arguments)
    return Route.RETRIED if found is Route.COPY else found


def _nobodys(via: str) -> Redrive | None:
    back = read_via(via)
    return back and back._replace(application="")


def _diverts_records(applied: Any, step: Divert) -> None:
    """Sends the whole record away for one of its items, whose siblings go on all the same."""
    before = len(applied.rejected)
    _divert(applied, step)
    applied.rejected[before:] = [replace(one, whole=True) for one in applied.rejected[before:]]


def _branch_alone(applied: Any, step: Branch) -> None:
    before = list(applied.elements)
    _branch(applied, step)
    applied.elements = before


def _one_by_one(applied: Applied, results: Sequence[Any]) -> list[Any]:
    """Rejects the items that fail, and nothing else of their records."""
    pairs = list(zip(applied.elements, results, strict=True))
    failed = [(element, result) for element, result in pairs if isinstance(result, EnvelopeError)]
    applied.rejected += [RejectedElement(element, result.reason, result.detail) for element, result in failed]
    kept = [pair for pair in pairs if not isinstance(pair[1], EnvelopeError)]
    applied.elements = [element for element, _ in kept]
    return [result for _, result in kept]


def _without_chain(value: Any, mended: bytes, letter: Any, key: bytes | None, hops: Any) -> bytes:
    return encode(Envelope(mended, key=key, chain=tuple(hops)))


def _lists_the_stage_alone(self: DeadLetterCollector, entry: Entry) -> set[Entry]:
    self.changes.added.add(entry)
    return {entry}


def _of_the_fold_alone(steps: Any, source: str, **options: Any) -> str:
    *_, stage = steps
    made: str = _definition_of([replace(stage, co_partitioned=True)], "", **options)
    return made


_definition_of = original(stages, "definition_of")
_divert = original(steps, "_divert")
_branch = original(steps, "_branch")


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "every-letter-taken": (
        "a flow folds every redriven record, whoever gave it up",
        [(Ledger, "route", _takes_every_letter)],
    ),
    "copies-judged-as-retries": (
        "what another application gave up is judged as what comes through a retry topic",
        [(Ledger, "route", _retried)],
    ),
    "service-takes-every-letter": (
        "a republisher passes every redriven record on, whoever gave it up",
        [(processor, "read_via", lambda via: None)],
    ),
    "service-takes-no-letter": (
        "a republisher drops what it gave up itself when it is redriven",
        [(processor, "read_via", _nobodys)],
    ),
    "outputs-not-marked": (
        "what a flow publishes of an element that it folded late does not say so",
        [(publishing, "_late", lambda element, hop: ())],
    ),
    "outputs-before-a-stage-not-listed": (
        "the ledger does not list that outputs before a stage are missing",
        [(DeadLetterCollector, "_add_entries", _lists_the_stage_alone)],
    ),
    "divert-takes-the-record": (
        "the dead letter of a diverted item brings back its siblings, which were folded",
        [(steps, "_STEPS", {**steps._STEPS, Divert: _diverts_records})],
    ),
    "step-rejects-one-by-one": (
        "a step that fails for an item lets its siblings go on",
        [(Applied, "survivors", _one_by_one)],
    ),
    "ledger-with-the-manifest": (
        "dead letters are listed when their batch is committed, and not before",
        [
            (DeadLetterCollector, "unlisted", lambda self: set()),
            (Changes, "resolved", lambda self: replace(self, filled=self.filled - self.again, again=set())),
        ],
    ),
    "struck-although-rejected-again": (
        "an entry that a record fills is struck from the ledger, though the record is rejected again",
        [(Changes, "resolved", lambda self: replace(self, added=set(), again=set()))],
    ),
    "branch-fails-alone": (
        "a record that fails in a branch goes on on the main line",
        [(steps, "_STEPS", {**steps._STEPS, Branch: _branch_alone})],
    ),
    "mend-drops-the-chain": (
        "a dead letter that is mended comes back without its chain",
        [(redrive, "_rebuilt", _without_chain)],
    ),
    "definition-without-lanes": (
        "a definition leaves out what names the lanes",
        [(stages, "definition_of", _of_the_fold_alone)],
    ),
    "letters-taken-for-envelopes": (
        "every dead letter is taken for an envelope, that of a topic without envelopes as well",
        [(redrive, "_is_envelope", lambda value, letter: letter.reason is not Reason.NOT_AN_ENVELOPE)],
    ),
}

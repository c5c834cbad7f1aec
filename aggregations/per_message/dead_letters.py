"""Collects a runner's dead letters: the facts of each, and its entries in the ledger."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aggregations.definition.element import Element
from aggregations.definition.flow import END_OF_FLOW
from aggregations.definition.inputs import SiblingPolicy
from aggregations.per_message.arrivals import standing_of
from aggregations.per_message.cause import Cause
from aggregations.per_message.ledger import Changes, Entry, Ledger, dead_entry, hole_at, outputs_before
from aggregations.per_message.stage import Decided
from aggregations.per_message.steps import RejectedElement
from envelope import EnvelopeError, Node, Reason, Route, Standing, Verdict
from envelope.dedup.lineage import Redriven, died_in
from envelope.raised import Raised

BEYOND_END: Final = "its root's offset is beyond the end of the root topic"


@dataclass(slots=True)
class RejectedRecord:
    """A record bound for the dead-letter topic.

    Attributes:
        own: Its coordinates.
        stage: Stage that could not fold it, or that it was bound for; empty for a record that could not be read,
            `end` after the last stage.
        reason: Reason code.
        detail: What was wrong, without any value of the message.
        lineage: Its lineage as text, if it could be read.
        hole: It left a hole in the states of its keys.
        items: Its items that the flow diverted, by their index in each flat-map; empty for the record as a whole.
        raised: Exception of user code, when that is the reason; else None.
    """

    own: Node
    stage: str
    reason: Reason
    detail: str
    lineage: str = ""
    hole: bool = False
    items: tuple[tuple[int, ...], ...] = ()
    raised: Raised | None = None

    @property
    def cause(self) -> str:
        """Exception of user code and its stage, in one line without any value; empty without an exception."""
        return f"stage {self.stage}: {self.reason.value}, {self.raised}" if self.raised else ""


@dataclass(slots=True)
class DeadLetterCollector:
    """Collects the dead letters of a batch, or of a part of it.

    Attributes:
        ledger: The ledger before the batch.
        first: Name of the first stage.
        siblings: Policy for equal positions without index and id.
        topic_ids: Current topic id by topic.
        followed: Names of the stages that are followed by other stages or by outputs.
        publishing: Names of the stages with publish steps before them.
        listing: Names of the stages whose holes are listed even if they are not proven.
        dead: Dead letters, one per record and stage.
        changes: Changes that the batch makes to the ledger.
        copies: Redriven records that this flow did not reject, by the stage that dropped them before the key was known.
    """

    ledger: Ledger
    first: str
    siblings: SiblingPolicy
    topic_ids: Mapping[str, str]
    followed: frozenset[str]
    publishing: frozenset[str]
    listing: frozenset[str] = frozenset()
    dead: dict[tuple[Node, str], RejectedRecord] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)
    copies: Counter[str] = field(default_factory=Counter)

    def unread(self, own: Node, error: EnvelopeError, *, again: bool = True) -> None:
        """Collect a record that cannot be read.

        Args:
            own: Its coordinates, with its cluster.
            error: The error, with the chain if that could be read.
            again: It may be a copy; matters only if the chain could be read.
        """
        if error.chain is not None:
            element: Element[Any] = Element(None, None, own, error.chain, again=again)
            self.rejected("", RejectedElement.because(element, Cause.of(error)))
            return
        self._add(RejectedRecord(own, "", error.reason, error.detail))
        self._add_entries(Entry(self.first, died_in(own), (own.offset,)))

    def turned_away(self, stage: str, rejection: RejectedElement, *, fixed: int = 0) -> None:
        """Collect an element that a filter rejected: what the steps before the filter published of it is not missing."""
        self.rejected(stage, rejection, fixed=fixed, arrived=True)

    def rejected(self, stage: str, rejection: RejectedElement, *, fixed: int = 0, arrived: bool = False) -> None:
        """Collect an element that a step before a stage rejected or diverted; an empty stage means it was not read."""
        element = rejection.element
        lineage = element.lineage.resolved(self.topic_ids)
        dead = RejectedRecord(
            element.own, stage, rejection.reason, rejection.detail, str(lineage), raised=rejection.raised
        )
        if not rejection.whole and element.indices:
            dead.items = (element.indices,)
        self.lost(
            dead,
            standing_of(element, lineage, self.siblings),
            lineage.redriven,
            element.indices,
            proven=element.route is Route.MISSING or (element.route is Route.PLAIN and not element.again),
            late=element.route is not Route.PLAIN,
            whole=rejection.whole,
            arrived=arrived,
            fixed=fixed,
        )

    def lost(
        self,
        dead: RejectedRecord,
        standing: Standing,
        redriven: Redriven | None,
        indices: tuple[int, ...] = (),
        *,
        proven: bool,
        late: bool = False,
        whole: bool = True,
        arrived: bool = False,
        fixed: int = 0,
    ) -> None:
        """Collect a dead letter without a hole: it is listed, unless it was redriven and is already listed or a hole.

        Args:
            dead: Its facts.
            standing: Where it stands, in any lane of its group.
            redriven: How it came back from the dead-letter topic.
            indices: Its index in each flat-map of the flow.
            proven: It is the first delivery of its event.
            late: An earlier stage has folded it late.
            whole: All items of its record were rejected with it.
            arrived: It reached the stage, which is a filter: its outputs before the stage are not missing.
            fixed: Number of indices that the previous stage gave it.
        """
        if redriven is not None and not late:
            redrive = redriven.redrive
            mine = self.ledger.mine(redrive)
            stage = redrive.stage if mine else ""
            listed = self.ledger.entries(stage or self.first, dead.own, standing, redriven, indices, whole=True)
            unlisted = mine and (redrive.hole or bool(self.ledger.forgotten.get(stage or self.first)))
            if not listed and not unlisted:
                self.copies[dead.stage or self.first] += 1
                return
            # It stays a hole in a state, or entries of the ledger, as before.
            dead.stage, dead.hole = stage, mine and redrive.hole
            if whole:
                self.changes.again.update(listed)
            else:
                self._split(stage or self.first, dead.own, standing, redriven, indices)
            size = len(standing.position)
            items = [entry.position[size:] for entry in listed if entry.group == standing.group]
            if items and all(items) and not indices:
                dead.items = tuple(sorted(tuple(map(int, item)) for item in items))
        else:
            name = dead.stage or self.first
            entry = self._list(name, dead.own, standing, redriven, indices, proven=proven, whole=whole, fixed=fixed)
            entries = {entry} if arrived else self._add_entries(entry)
            if late:
                self.changes.again |= entries
            elif entry.stage == END_OF_FLOW and self.changes.filled:
                # Not redriven, and some of it is listed: that was filled when it arrived.
                listed = self.ledger.entries(entry.stage, dead.own, standing, None, indices, whole=True)
                sizes = {standing.group: len(standing.position), died_in(dead.own): 1 + len(indices)}
                self.changes.again |= {entry, *(one for one in listed if len(one.position) >= sizes[one.group])}
        self._add(dead)

    def _split(self, stage: str, own: Node, standing: Standing, redriven: Redriven, indices: tuple[int, ...]) -> None:
        """List a diverted item of a listed record by itself: its siblings, which arrive, fill the record's entry."""
        for place in (stage, outputs_before(stage)):
            entries = self.ledger.entries(place, own, standing, redriven, indices)
            proven = any(entry.group == standing.group for entry in entries)
            if entries:
                item = dead_entry(place, own, standing, redriven, indices, proven=proven, whole=False)
                self.changes.added.add(item)
                self.changes.again.add(item)

    def _add_entries(self, entry: Entry) -> set[Entry]:
        """List a dead letter that was rejected before its stage, and its outputs before that stage as missing."""
        entries = {entry}
        if entry.stage in self.publishing:
            entries.add(entry._replace(stage=outputs_before(entry.stage)))
        self.changes.added |= entries
        return entries

    def _list(
        self,
        stage: str,
        own: Node,
        standing: Standing,
        redriven: Redriven | None,
        indices: tuple[int, ...],
        *,
        proven: bool,
        whole: bool,
        fixed: int,
    ) -> Entry:
        event = dead_entry(stage, own, standing, redriven, indices, proven=True, whole=whole, fixed=fixed)
        # A copy of a listed dead letter is the same event.
        if not (proven or event in self.changes.added or not self.ledger.missing_from([event])):
            event = dead_entry(stage, own, standing, redriven, indices, proven=False, whole=whole, fixed=fixed)
        self.changes.added.add(event)
        return event

    def decided(self, stage: str, decided: Iterable[Decided]) -> None:
        """Collect the dead letters and ledger changes from a stage's decisions."""
        for one in decided:
            self.changes.filled.update(one.filled)
            arrival = one.arrival
            if stage in self.listing and (one.settles or one.decision.verdict is Verdict.COPY):
                held = self.ledger.entries(hole_at(stage), *arrival.listed_as)
                self.changes.filled.update(held)
            if one.reason is not None:
                self._refused(stage, one)

    def _refused(self, stage: str, one: Decided) -> None:
        arrival = one.arrival
        element, redriven, at, fixed = arrival.element, arrival.redriven, arrival.standing, arrival.fixed
        lineage, indices = str(element.lineage), element.indices
        assert one.reason is not None
        dead = RejectedRecord(element.own, stage, one.reason, one.detail, lineage, one.hole, raised=one.raised)
        if arrival.transit and redriven is not None:
            dead.stage, dead.hole = redriven.redrive.stage, redriven.redrive.hole
        elif one.hole:
            # It is missing at later stages, and stages before it may have to know what they passed on of it.
            if stage in self.followed and one.proven:
                self._list(stage, element.own, at, redriven, indices, proven=True, whole=True, fixed=fixed)
            elif stage in self.listing:
                name = hole_at(stage)
                self._list(name, element.own, at, redriven, indices, proven=one.proven, whole=True, fixed=fixed)
        elif one.failed:
            # Not a hole: its key may be another one when it comes back. Its outputs before the stage are published.
            late = element.route is not Route.PLAIN
            if redriven is not None and not late:
                self.lost(dead, at, redriven, indices, proven=one.proven, fixed=fixed)
                return
            entry = self._list(stage, element.own, at, redriven, indices, proven=one.proven, whole=True, fixed=fixed)
            self.changes.again |= {entry} if late else set()
        elif one.decision.verdict is Verdict.UNPROVEN:
            self._list(stage, element.own, at, redriven, indices, proven=False, whole=False, fixed=fixed)
            dead.items = (indices,) if indices else ()
        elif one.reason is Reason.WINDOW_CLOSED and indices:
            dead.items = (indices,)
        self._add(dead)

    def published(self, filled: Iterable[Entry]) -> None:
        """Collect entries of outputs before a stage that are no longer missing."""
        self.changes.filled.update(filled)

    def tail(self, filled: Iterable[Entry], *, copies: int) -> None:
        """Collect redriven records after the last stage: entries that are no longer missing, and copies."""
        self.changes.filled.update(filled)
        if copies:
            self.copies[END_OF_FLOW] += copies

    def take(self, dead: Iterable[RejectedRecord]) -> None:
        """Add dead letters of another task."""
        for one in dead:
            self._add(one)

    def unlisted(self) -> set[Entry]:
        """Dead letters that must be added to the ledger before anything is published or persisted."""
        return self.ledger.missing_from(self.changes.added)

    def _add(self, dead: RejectedRecord) -> None:
        """Once per record and stage, though several of its items may fail."""
        known = self.dead.setdefault((dead.own, dead.stage), dead)
        if known is not dead:
            known.items = (*known.items, *dead.items) if known.items and dead.items else ()

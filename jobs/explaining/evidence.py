"""What the topics and the stores show about a record, beside the states: copies, dead letters, the ledger."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aggregations.definition.flow import Stage
from aggregations.per_message.arrivals import Arrival
from aggregations.per_message.ledger import Ledger
from envelope import Lineage, Node, Position, Standing
from envelope.dedup.lineage import Redriven, died_in
from envelope.redrive_notes import Notes
from jobs.dead_letters.letters import Letters, StoredDeadLetter
from jobs.explaining.copies import Copy
from jobs.explaining.filters import Judged
from jobs.explaining.journal import Journaled
from jobs.explaining.outcome import InBatch
from jobs.tracing import Place
from persistence.times import Committed

Progress = Callable[[int, int], None]
"""Called with the number of records read, and their total."""


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The dead letters of some records in a topic.

    Attributes:
        by_place: Those of each record, by its coordinates.
        notes: Which were redriven.
    """

    by_place: Mapping[Place, Sequence[StoredDeadLetter]] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)

    @classmethod
    def read(
        cls,
        letters: Letters,
        ledger: Ledger,
        places: Collection[Place],
        own_id: Callable[[Place], str],
        progress: Progress | None = None,
    ) -> "DeadLetters":
        """Read the dead letters of records.

        Args:
            letters: The dead letters of a topic.
            ledger: The ledger of the flow that rejected them.
            places: The records.
            own_id: Returns the topic id of a record: a dead letter of an earlier topic of that name is another record's.
            progress: Shows how far it is.
        """
        found = dict[Place, list[StoredDeadLetter]]()
        for done, letter in enumerate(letters, start=1):
            if progress is not None:
                progress(done, letters.total)
            if (facts := letter.facts) is None or not ledger.mine(facts):
                continue
            place = Place(facts.topic, facts.partition, facts.offset)
            if place in places and facts.topic_id in ("", own_id(place)):
                found.setdefault(place, []).append(letter)
        return cls(found, letters.notes)

    def was_redriven(self, letter: StoredDeadLetter) -> bool:
        """Whether a note says that a dead letter was redriven."""
        return self.notes.count(letter.place.partition, [letter.place.offset]) > 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about a record.

    Attributes:
        copies: Other records of its event, in order of their coordinates.
        earlier: Those in its partition that the flow read before it.
        lineage: Its lineage, with the root's topic id; None if it cannot be read.
        letters: Its own dead letters.
        dead: All dead letters that were read.
        ledger: The flow's ledger.
        stages: Names of the flow's stages.
        in_order: No record of its event is in another partition, and no record before it is later in its lane: all of them
            were searched.
        in_one_batch: The flow has read everything in one batch, at the first attempt.
        given_up: It is a dead letter, and nothing shows that its event was folded: it was not redriven, and no other record
            of its event came later.
        searched: Number of offsets before it that were searched.
        is_whole: These are all, from the one at which the flow began.
        is_complete: So are those of the other partitions that may have records of its event.
        times: When batches were committed.
        has_letters: The flow's dead-letter topic was read.
        journaled: What the journal says about it; None without a journal, or if it does not have the record's batch.
        unlisted: Why the journal says nothing about it; empty without a journal, or if it does.
        filtered: What the flow's filters decide about it if they are asked again, by stage.
    """

    copies: tuple[Copy, ...] = ()
    earlier: tuple[Copy, ...] = ()
    lineage: Lineage | None = None
    letters: Sequence[StoredDeadLetter] = ()
    dead: DeadLetters = field(default_factory=DeadLetters)
    ledger: Ledger = field(default_factory=lambda: Ledger(""))
    stages: tuple[str, ...] = ()
    in_order: bool = False
    in_one_batch: bool = False
    given_up: bool = False
    searched: int = 0
    is_whole: bool = False
    is_complete: bool = False
    times: tuple[Committed, ...] = ()
    has_letters: bool = False
    journaled: Journaled | None = None
    unlisted: str = ""
    filtered: Mapping[str, Judged] = field(default_factory=dict)

    def taken_by(self, stage: Stage, arrival: Arrival) -> Copy | None:
        """The earlier record that took the place of an arrival at a stage: the first one that was not rejected before."""
        entered = self._entered(self.lineage)
        return next(
            (
                copy
                for copy in self.earlier
                # What enters at a later stage was a dead letter there: the stages before hold it, and drop other records.
                if (at := self._entered(copy.lineage)) <= stage.index
                and (at or not entered)
                and not self._stopped(copy, stage, arrival)
                and not self.is_apart(copy, stage, arrival)
            ),
            None,
        )

    def is_apart(self, copy: Copy, stage: Stage, arrival: Arrival) -> bool:
        """Whether another record is on another lane than an arrival: a batch does not judge them in order of offsets."""
        if stage.aggregate.rule is not None or self.lineage is None or copy.lineage is None:
            return False
        branch = arrival.element.branch
        same = arrival.standing.lane == self.lineage.standing(branch=branch).lane
        return copy.lineage.standing(rekeyed=not same, branch=branch).lane != arrival.standing.lane

    def among(self, places: Collection[Place]) -> "Evidence":
        """The evidence with no other records of its event than these."""
        copies, earlier = ([copy for copy in given if copy.place in places] for given in (self.copies, self.earlier))
        return replace(self, copies=tuple(copies), earlier=tuple(earlier))

    def rejected_at(self, stage: Stage, arrival: Arrival) -> StoredDeadLetter | None:
        """The dead letter of an arrival that a stage, or a step before it, has made of its record."""
        return next((one for one in self.letters if self._number(one) == stage.index and _is_of(one, arrival)), None)

    def rejected_before(self, stage: Stage) -> bool:
        """Whether the record became a dead letter before it could arrive at a stage."""
        return any(self._number(one) < stage.index for one in self.letters)

    def passed(self, stage: Stage, indices: tuple[int, ...]) -> bool:
        """Whether an item of the record became a dead letter after a stage, which therefore has passed it on."""
        later = [one.facts for one in self.letters if one.facts is not None and self._number(one) > stage.index]
        items = [item for facts in later for item in facts.items or ((),)]
        return any(item[: len(indices)] == indices for item in items)

    def _entered(self, lineage: Lineage | None) -> int:
        """Number of the stage that a record was redriven to; 0 if it was not redriven, or another reader rejected it."""
        redrive = None if lineage is None else lineage.redrive
        mine = redrive is not None and self.ledger.mine(redrive)
        return self._index(redrive.stage) if redrive is not None and mine else 0

    def _index(self, name: str) -> int:
        """Number of a stage, of the first one without a name; the number of stages for what comes after the last one."""
        name = name or self.stages[0]
        return self.stages.index(name) if name in self.stages else len(self.stages)

    def _stopped(self, copy: Copy, stage: Stage, arrival: Arrival) -> bool:
        """Whether another record of an arrival's event was rejected at a stage, or before."""
        if letters := self.dead.by_place.get(copy.place):
            return any(self._number(one) <= stage.index and _is_of(one, arrival) for one in letters)
        node = self.lineage.nodes[self.lineage.died] if self.lineage is not None and arrival.mine else None
        return node is not None and copy.place == Place(node.topic, node.partition, node.offset)

    def _number(self, letter: StoredDeadLetter) -> int:
        """Number of the stage that rejected a record."""
        assert letter.facts is not None
        return self._index(letter.facts.stage)

    def by_batch(self, batch: int) -> InBatch:
        """A batch as the latest that may have read the record, with the time at which that batch was committed."""
        epoch, found, time_ms = next((one for one in self.times if one[1] >= batch), (None, None, None))
        return InBatch(batch, epoch if found == batch else None, time_ms)

    def redriven(self, letter: StoredDeadLetter) -> tuple[bool, Place | None]:
        """Whether a dead letter was redriven, and the redriven record if it was found."""
        place = Place(letter.place.topic, letter.place.partition, letter.place.offset)
        back = next((copy.place for copy in self.copies if copy.letter == place), None)
        return back is not None or self.dead.was_redriven(letter), back


def _is_of(letter: StoredDeadLetter, arrival: Arrival) -> bool:
    """Whether a dead letter of an arrival's record is of the arrival, and not of other items alone."""
    assert letter.facts is not None
    items, indices = letter.facts.items, arrival.element.indices
    return not items or any(indices[: len(item)] == item for item in items)


def is_listed(ledger: Ledger, own: Node, standing: Standing | None, redriven: Redriven | None = None) -> bool:
    """Whether the ledger lists a record, or an item of it, as a dead letter.

    Args:
        ledger: The flow's ledger.
        own: Coordinates of the record, with its topic id.
        standing: Where it stands; None if it cannot be read.
        redriven: How it came back from the dead-letter topic; None if it did not.
    """
    places: list[tuple[str, Position]] = [(died_in(own), (own.offset,))]
    if redriven is not None:
        places.append((redriven.place, (redriven.offset,)))
    if standing is not None:
        places.append((standing.group, standing.position))
    return any(
        at[: len(position)] == position
        for groups in ledger.listed.values()
        for group, position in places
        for at in groups.get(group, ())
    )

"""What the topics and the stores show about a record, beside the states: copies, dead letters, the ledger."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from aggregations.per_message.ledger import Ledger
from envelope import Node, Position, Standing
from envelope.dedup.lineage import died_in
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
        taken_by: The earlier record of its partition that took its place.
        letters: Its own dead letters.
        dead: All dead letters that were read.
        is_first: It is the first record of its event, and no record before it is later in its lane: all of them were
            searched, from the one at which the flow began.
        given_up: It is a dead letter, and nothing shows that its event was folded: it was not redriven, and no other record
            of its event came later.
        searched: Number of offsets before it that were searched.
        is_whole: These are all, from the one at which the flow began.
        times: When batches were committed.
        has_letters: The flow's dead-letter topic was read.
        journaled: What the journal says about it; None without a journal, or if it does not have the record's batch.
        unlisted: Why the journal says nothing about it; empty without a journal, or if it does.
        filtered: What the flow's filters decide about it if they are asked again, by stage.
    """

    copies: tuple[Copy, ...] = ()
    taken_by: Copy | None = None
    letters: Sequence[StoredDeadLetter] = ()
    dead: DeadLetters = field(default_factory=DeadLetters)
    is_first: bool = False
    given_up: bool = False
    searched: int = 0
    is_whole: bool = False
    times: tuple[Committed, ...] = ()
    has_letters: bool = False
    journaled: Journaled | None = None
    unlisted: str = ""
    filtered: Mapping[str, Judged] = field(default_factory=dict)

    def by_batch(self, batch: int) -> InBatch:
        """A batch as the latest that may have read the record, with the time at which that batch was committed."""
        epoch, found, time_ms = next((one for one in self.times if one[1] >= batch), (None, None, None))
        return InBatch(batch, epoch if found == batch else None, time_ms)

    def redriven(self, letter: StoredDeadLetter) -> tuple[bool, Place | None]:
        """Whether a dead letter was redriven, and the redriven record if it was found."""
        place = Place(letter.place.topic, letter.place.partition, letter.place.offset)
        back = next((copy.place for copy in self.copies if copy.letter == place), None)
        return back is not None or self.dead.was_redriven(letter), back


def is_listed(ledger: Ledger, own: Node, standing: Standing | None) -> bool:
    """Whether the ledger lists a record, or an item of it, as a dead letter.

    Args:
        ledger: The flow's ledger.
        own: Coordinates of the record, with its topic id.
        standing: Where it stands; None if it cannot be read.
    """
    places: list[tuple[str, Position]] = [(died_in(own), (own.offset,))]
    if standing is not None:
        places.append((standing.group, standing.position))
    return any(
        at[: len(position)] == position
        for groups in ledger.listed.values()
        for group, position in places
        for at in groups.get(group, ())
    )

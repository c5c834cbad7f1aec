"""What `explain` says about the records of a flow, held against what the flow did with each of them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any
from unittest.mock import patch

from aggregations.definition.element import Record
from aggregations.definition.flow import Flow
from aggregations.per_message.stage import Decided
from envelope import Node
from jobs.explaining.copies import Events
from jobs.explaining.explain import explained
from jobs.explaining.log import Reader
from jobs.explaining.outcome import AtStage, Explanation, Fate, Outcome
from jobs.tracing import Place

Folded = frozenset[tuple[Place, tuple[int, ...]]]
"""Elements that the states of a stage have: record, and index in each flat-map."""

_CAUTIOUS = ("the one that was read first is folded", "is among th", "the filter passed it on", "is no longer missing")
"""Parts of what `explain` says if a state has an event, and not surely because of this record."""


class UntrueError(AssertionError):
    """What `explain` says is not what happened."""


def event_place(node: Node) -> Place:
    """Coordinates of a record, with the id of its topic."""
    return Place(node.topic_id, node.partition, node.offset)


def is_passed_on(one: Decided, *, filters: bool) -> bool:
    """Whether a stage has folded an element, or a filter has passed it on."""
    return not one.arrival.transit and (bool(one.emitted) if filters else one.decision.fold)


class Reports:
    """What `explain` says about records.

    Args:
        flow: The flow.
        reader: Reads its topics.
        stores: URL of the store by stage.
        folded: What the states of each stage have, because of which records.
        records: The records.

    Attributes:
        said: Number of elements by outcome, and of dead letters by what became of them.
    """

    def __init__(
        self,
        flow: Flow[Any],
        reader: Reader,
        stores: Mapping[str, str],
        folded: Mapping[str, Folded],
        records: Iterable[Record],
    ) -> None:
        self._flow, self._reader, self._stores, self._folded = flow, reader, stores, folded
        self._records = list(records)
        # Of these stages the first record of an event may be dropped, too.
        self._lossy = {stage.name for stage in flow.stages if flow.is_timed or stage.aggregate.rule is not None}
        self.said: Counter[str] = Counter()
        events = Events(flow, reader.topic_ids({}))
        self._reads = {id(record): events.of(record) for record in self._records}
        self._events = {
            event_place(record.node): read.event for record in self._records if (read := self._reads[id(record)])
        }
        letters = (one.facts for one in reader.letters("dead") if one.facts is not None)
        names = flow.stage_names
        self._rejected = {
            (Place(one.topic_id, one.partition, one.offset), name)
            for one in letters
            for name in names[names.index(one.stage) if one.stage in names else 0 :]
        }

    def check(self, **options: Any) -> None:
        """Check what is said about every record that the topics have now.

        Raises:
            UntrueError: Something is not what happened.
        """
        given = {"dead_letters": "dead", **options}
        with patch.object(
            Events, "of", lambda _, record: self._reads[id(record)]
        ):  # each record once, not once for each
            for record in self._records:
                log = self._reader.log(record.topic)
                if record.topic_id == log.topic_id and record.offset >= log.low[record.partition]:
                    place = Place(record.topic, record.partition, record.offset)
                    self._check(explained(self._flow, place, self._reader, self._stores, **given), record)

    def _check(self, found: Explanation, record: Record) -> None:
        if found.outcome in (Outcome.NOT_READ, Outcome.SKIPPED):
            self.said[found.outcome] += 1
            return
        place = event_place(record.node)
        for row in found.stages:
            self.said[row.outcome] += 1
            if wrong := self._wrong(row, place, found):
                raise UntrueError(f"{_text(found)}; stage {row.stage}, item {row.indices}: {wrong}")
        for stage, folded in self._folded.items():
            for _, indices in (one for one in folded if one[0] == place):
                if not any((row.stage, row.indices) == (stage, indices) for row in found.stages):
                    raise UntrueError(f"{_text(found)}; nothing about stage {stage}, which has item {indices}")
        for letter in found.letters:
            self.said[letter.fate] += 1
            if letter.fate is Fate.DISCARDED:
                raise UntrueError(f"{_text(found)}; dead letter {letter.place} counts as discarded")

    def _wrong(self, row: AtStage, place: Place, found: Explanation) -> str:
        """What is wrong with what is said about an element at a stage; empty if nothing is."""
        folded, event = self._folded.get(row.stage, frozenset()), self._events.get(place)
        mine = (place, row.indices) in folded
        has = {other for other, indices in folded if indices == row.indices and self._events.get(other) == event}
        if row.outcome is Outcome.FOLDED and any(other not in self._events for other, _ in folded):
            return ""  # a record of a topic that was created again since may have taken its place
        # A record that was rejected is folded itself if the stores went back, and it was read again.
        mine = mine or (row.outcome is Outcome.FOLDED and any((other, row.stage) in self._rejected for other in has))
        names = ", ".join(map(str, has)) or "nothing"
        match row.outcome:
            case Outcome.MISSING:
                return f"{names} is folded"
            case Outcome.FOLDED if not mine and not (has and any(text in row.why for text in _CAUTIOUS)):
                return f"{names} is folded"
            case Outcome.DROPPED | Outcome.REMOVED | Outcome.DEAD_LETTER if mine:
                return "it is folded"
            case Outcome.DEAD_LETTER if not (found.letters or row.waits):
                return "it has no dead letter"
            case Outcome.DEAD_LETTER if row.waits and has:
                return f"{names} is folded"
            case Outcome.DROPPED if "is the same event" in row.why and row.stage not in self._lossy and not has:
                return "no record of its event is folded"
        return ""


def _text(found: Explanation) -> str:
    rows = [f"{one.stage} {one.indices}: {one.outcome.value} ({one.why})" for one in found.stages]
    letters = [f"{one.place}, {one.stage}, {one.reason}: {one.fate.value}" for one in found.letters]
    return f"explain {found.place}: {found.outcome.value}; {rows}; letters {letters}; {found.lineage}"

"""Watches the number of partitions of the topics that a member reads; `jobs.republish.growth` contains the rule."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

from jobs.republish.absence import Unsafe
from jobs.republish.counts import Statistics, TopicGrowth
from jobs.republish.growth import Committed, Note, Readable, judge
from persistence.growth import GROWN_UNDRAINED, Ends, undrained
from persistence.kafka.facts import TopicFacts

_LOG = logging.getLogger("headwater.republish")

_AWAY_SECONDS: Final = 120.0  # an idle member looks once a minute; after a longer gap a topic may have grown repeatedly
_JUDGE_SECONDS: Final = 1.0  # between two reads of the group's committed offsets, while new partitions wait
_UNSURE_SECONDS: Final = 10.0  # for a member that saw the growth to note it: a batch, its flush and a commit, with room


class _Watch(NamedTuple):
    """Observations of a topic: its id, its successive numbers of partitions, and when it was last seen."""

    topic_id: str
    counts: tuple[int, ...]
    looked: float


class GrowthWatch:
    """A member's knowledge of growing topics. It is kept when the member makes a new consumer.

    Args:
        sources: Topics whose order is kept. Retry topics have no order.
        group: The consumer group.
        accepted: Whether new partitions are read immediately, and disorder is accepted.
        max_age: Seconds for which producers may not know of new partitions.
        statistics: Statistics that show growths.
        on_change: Called when the statistics have changed.
    """

    def __init__(
        self,
        sources: Collection[str],
        *,
        group: str,
        accepted: bool,
        max_age: float,
        statistics: Statistics,
        on_change: Callable[[], None],
    ) -> None:
        self.sources = frozenset(sources)
        self._group = group
        self._accepted = accepted
        self._max_age_ms = round(max_age * 1000)
        self._statistics = statistics
        self._on_change = on_change
        self._watched: dict[str, _Watch] = {}
        self._verdicts: dict[str, Readable] = {}
        self._judged: dict[str, float] = {}
        self._unsure: dict[str, float] = {}

    @property
    def under_way(self) -> bool:
        """Whether partitions wait."""
        return bool(self._statistics.growing)

    def see(self, fact: TopicFacts) -> bool:
        """Note a topic's number of partitions; return whether its order is kept and the number has risen."""
        now, before = time.monotonic(), self._watched.get(fact.name)
        if before is None or before.topic_id != fact.topic_id:
            counts: tuple[int, ...] = (fact.partitions,)
        elif now - before.looked > _AWAY_SECONDS:
            counts = (max(fact.partitions, before.counts[-1]),)
        elif fact.partitions > before.counts[-1]:
            counts = (*before.counts, fact.partitions)
        else:  # unchanged, or reported by a broker that does not know the new number yet
            counts = before.counts
        self._watched[fact.name] = _Watch(fact.topic_id, counts, now)
        return fact.name in self.sources and before is not None and counts[-1] > before.counts[-1]

    def count(self, topic: str) -> int:
        """Number of partitions of a topic that was seen."""
        return self._watched[topic].counts[-1]

    def forget(self, topics: Iterable[str]) -> None:
        """Stop showing the growth of topics of which this member has no partition any more."""
        for topic in topics:
            self._statistics.growing.pop(topic, None)

    def is_due(self, topic: str) -> bool:
        """Whether it is time to judge a topic that was seen."""
        verdict = self._verdicts.get(topic, Readable(0))
        if topic not in self.sources or verdict.resolved >= self.count(topic):
            return False
        return time.monotonic() - self._judged.get(topic, -_JUDGE_SECONDS) >= _JUDGE_SECONDS

    def judge(self, topic: str, places: Mapping[int, Committed], ends: Ends) -> Readable:
        """Return which partitions may be read.

        Args:
            topic: A topic that was seen.
            places: The group's committed offsets and notes, by partition.
            ends: Returns the ends of the topic.

        Raises:
            Unsafe: The order of a key cannot be kept.
        """
        watch, now = self._watched[topic], time.monotonic()
        verdict = judge(places, watch.counts[-1], watched=watch.counts, ends=ends, accepted=self._accepted)
        self._verdicts[topic], self._judged[topic] = verdict, now
        if verdict.sure:
            self._unsure.pop(topic, None)
        elif now - self._unsure.setdefault(topic, now) >= _UNSURE_SECONDS:
            raise Unsafe(
                f"group {self._group}: {undrained(topic, verdict.resolved, watch.counts[-1])}",
                "Continue if readers of the target need no order, or if their history= exceeds the unread records of a "
                f"key (--accept {GROWN_UNDRAINED})",
            )
        return verdict

    def note(self, topic: str, note: Note, verdict: Readable, end: Callable[[], int]) -> Note:
        """Return the note to commit with a partition's offset.

        Args:
            topic: A topic that was judged.
            note: The previous note of the partition.
            verdict: Result of `judge`.
            end: Returns the end of the partition.
        """
        now, resolved = self.count(topic), verdict.resolved
        if resolved >= now:
            return Note(note.topic_id, resolved)
        if not verdict.sure:
            return replace(note, resolved=resolved)
        return replace(note, resolved=resolved).grown(now, time.time_ns() // 1_000_000, self._max_age_ms, end)

    def show(self, topic: str, verdict: Readable, places: Mapping[int, Committed]) -> None:
        """Show which partitions wait, and for what, according to the notes that will be committed."""
        shown, now, resolved = self._statistics.growing, self.count(topic), verdict.resolved
        before = shown.pop(topic, None)
        if resolved < now:
            shown[topic] = view = TopicGrowth(resolved, now, _unread(places, resolved, now))
            if before is None or (before.unread is None) != (view.unread is None):
                _LOG.warning("%s", _describe(topic, view, sure=verdict.sure))
                self._on_change()
        elif before is not None:
            _LOG.warning("growth of topic %s is over: all %d partitions are read", topic, now)
            self._on_change()


def _unread(places: Mapping[int, Committed], resolved: int, now: int) -> int | None:
    """Number of offsets that must be read first; None while the end of an old partition is not taken yet."""
    left = 0
    for one in range(resolved):
        place = places.get(one)
        if place is None or place.note.now != now or place.note.until is None:
            return None
        left += max(place.note.until - max(place.offset, 0), 0)
    return left


def _describe(topic: str, growth: TopicGrowth, *, sure: bool) -> str:
    text = f"growth of topic {topic} from {growth.partitions_before} to {growth.partitions_now} partitions"
    if not sure:
        return f"{text}, before it was read to its end: nothing is read until another member has noted how it grew"
    if growth.unread is None:
        return f"{text}: new ones wait; producers may not know of them yet, so the ends of the others are not taken"
    return f"{text}: new ones wait until {growth.unread} offsets of the others are read"

"""Retry topics whose writers do not mark their hops: the reader names them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import combinations, pairwise, product
from typing import Any, Final

from envelope.message import Hop


@dataclass(frozen=True, slots=True)
class Retries:
    """The retry topics of topics. A hop between a topic and its retry topics, in either direction, is a pass-through hop.

    A hop from any other topic into a retry topic is none: it is the step of the republisher that made the event, and its
    index distinguishes siblings.

    Attributes:
        topics: Topics, each with the names of its retry topics, or patterns of them with `*` and `?`.
    """

    topics: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def of(cls, given: Any) -> "Retries":
        """Return what a user gives: names or patterns of retry topics by topic; None for none.

        Raises:
            ValueError: It is something else, or a pattern matches the topic itself.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping | None):
            raise _invalid(given)
        topics = []
        for topic, names in (given or {}).items():
            retries = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Sequence) else ()
            if not retries or not all(isinstance(one, str) and one for one in (topic, *retries)):
                raise _invalid(given)
            if own := [one for one in retries if fnmatchcase(topic, one)]:
                raise ValueError(f"retries= of {topic}: {own[0]!r} is, or matches, the topic itself")
            topics.append((topic, retries))
        for (topic, names), (other, others) in combinations(topics, 2):
            for one, two in product(names, others):
                if _may_match(one, two):
                    raise ValueError(
                        f"retries= of {topic} and {other}: {one!r} and {two!r} can name one topic; a record in it would be tried "
                        "again for both. Give each topic retry topics of its own"
                    )
        return cls(tuple(topics))

    def marked(self, chain: tuple[Hop, ...], topic: str) -> tuple[Hop, ...]:
        """Return the chain of a record with its hops through retry topics marked as such.

        Args:
            chain: The chain, as in the envelope.
            topic: Topic of the record.
        """
        if not self.topics:
            return chain
        steps = pairwise((*(hop.topic for hop in chain), topic))
        return tuple(
            replace(hop, pass_through=True) if not hop.pass_through and self._repeats(*step) else hop
            for hop, step in zip(chain, steps, strict=True)
        )

    def _repeats(self, read: str, written: str) -> bool:
        """Whether a record of one topic is written to the other only to be tried again."""
        for topic, retries in self.topics:
            others = {read, written} - {topic}
            if others and all(any(fnmatchcase(one, name) for name in retries) for one in others):
                return True
        return False


NO_RETRIES: Final = Retries()


@cache
def _may_match(one: str, other: str) -> bool:
    """Whether two patterns with `*` and `?` can match the same name."""
    if not (one and other):
        return not (one + other).strip("*")
    if one[0] == "*":
        return _may_match(one[1:], other) or _may_match(one, other[1:])
    if other[0] == "*":
        return _may_match(one, other[1:]) or _may_match(one[1:], other)
    return (one[0] == other[0] or "?" in (one[0], other[0])) and _may_match(one[1:], other[1:])


def _invalid(given: object) -> ValueError:
    return ValueError(
        f'retries= takes names or patterns of retry topics by topic, such as {{"orders": "orders-retry-*"}}; got {given!r}'
    )

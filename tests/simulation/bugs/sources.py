"""Bugs of flows with several sources: topics that are taken for one another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from aggregations.definition import flow
from aggregations.definition.inputs import Input
from aggregations.definition.operators import source_definition
from aggregations.per_message import dead_letters, ledger
from aggregations.per_message.dead_letters import DeadLetterCollector, RejectedRecord
from aggregations.run import begin, consistency
from aggregations.run.run import Run
from envelope import Node
from envelope.dedup import lineage
from persistence.manifest import Manifest, Progress
from tests.simulation.patch import Patch, original
from tests.simulation.topology import SECOND

_following = original(Run, "following")
_died_in = lineage.died_in


def _one_letter_of_equal_offsets(self: DeadLetterCollector, dead: RejectedRecord) -> None:
    at = (replace(dead.own, topic="", topic_id=""), dead.stage)
    known = self.dead.setdefault(at, dead)
    if known is not dead:
        known.items = (*known.items, *dead.items) if known.items and dead.items else ()


def _place_without_topic(node: Node) -> str:
    return _died_in(replace(node, topic="", topic_id=""))


def _the_second_is_read_with_the_first(self: Run, offsets: Any, *arguments: Any) -> Manifest:
    """Notes the positions of the first topic for the second one, too, where that is longer."""
    made: Manifest = _following(self, offsets, *arguments)
    first, second = (made.positions.get(topic, {}) for topic in (self.sources[0], SECOND))
    ahead = {
        number: Progress(max(one.next_offset, first[number].next_offset if number in first else 0))
        for number, one in second.items()
    }
    return msgspec.structs.replace(made, positions={**made.positions, SECOND: ahead}) if second else made


def _by_its_first_source(inputs: Sequence[Input]) -> str:
    return source_definition(inputs[0].topic.definition)


BUGS: Mapping[str, tuple[str, Sequence[Patch]]] = {
    "letters-of-two-topics-are-one": (
        "dead letters of equal partition and offset in two topics are one",
        [(DeadLetterCollector, "_add", _one_letter_of_equal_offsets)],
    ),
    "topics-share-positions": (
        "the offsets of one topic count as those of the other",
        [(Run, "following", _the_second_is_read_with_the_first)],
    ),
    "removed-source-goes-on": (
        "a source may be removed or changed, and the states go on",
        [(module, "continues", lambda *_: True) for module in (begin, consistency)],
    ),
    "relay-is-known-by-one-source": (
        "the definition of a flow without a stage has its first source only",
        [(flow, "definition_without_stage", _by_its_first_source)],
    ),
    "ledger-without-topic": (
        "the ledger lists records without their topic",
        [(module, "died_in", _place_without_topic) for module in (lineage, ledger, dead_letters)],
    ),
}

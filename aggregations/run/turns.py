"""Tables and the main line of a flow take turns: a batch reads one table, or the sources of the main line.

So a table does not change while elements look it up. A batch that was begun is finished before another part of the flow
is read, also by the next run: the manifests name its ends before anything of it is published or persisted. A record that
a crashed attempt may have folded is therefore folded again with the same rows.

If a filter of the flow looks for ids over all partitions, the batch is even repeated as it was, with the same records: in
another batch, the other one of two duplicates might come first.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from aggregations.definition.flow import Flow
from aggregations.errors import RunRefusedError
from aggregations.per_message.stage import KeyState
from aggregations.run.run import Run
from aggregations.run.states import save_states, state_of
from envelope import TopicPartition
from persistence.commit.faults import effect, removal_of
from persistence.manifest import unread

_WRITES: Final = 10_000
"""States of a table that one call empties."""


def begin_batch(run: Run, ends: Mapping[TopicPartition, int], topic_ids: Mapping[str, str]) -> None:
    """Note the ends of a batch in every store before it is folded, if the flow (`Flow.notes_batches`) or the run needs it.

    Before it, the tables whose topics were created again lose the rows of the former topics.

    Args:
        run: The run.
        ends: Next offset after the batch, for the partitions that it reads.
        topic_ids: Current id of each source, if it is known.
    """
    if not (run.flow.notes_batches or run.notes):
        return
    _begin_tables_anew(run, topic_ids)
    found = unfinished(run)
    for (topic, partition), end in ends.items():
        mine = found.setdefault(topic, {})
        mine[partition] = max(end, mine.get(partition, 0))
    manifest = run.manifest
    if manifest is None or manifest.epoch != run.epoch or manifest.unfinished != found:
        # Also an unchanged note: tasks look for the manifest of this run.
        run.note(run.changed(unfinished=found))


def _begin_tables_anew(run: Run, topic_ids: Mapping[str, str]) -> None:
    """Empty the tables whose topics were created again: rows that the new topic does not have are gone.

    The manifest names the new topic with the next batch. Until then each run empties the table again, also of what a
    crashed one has folded of the new topic.
    """
    if part_to_finish(run) is run.flow.parts[-1]:
        return  # what was begun finds the rows that it found first
    for name, topic in run.former_tables(topic_ids).items():
        # Tasks of an earlier run see by it that what they read of the table may not be the rows of their batch.
        run.note(run.changed())
        stage = run.flow.stage(name)
        store, ref = run.stores[name], run.stage_ref(stage)
        found = [(key, one.version) for key, one in store.scan(ref) if state_of(one, ref, key).folded]
        for first in range(0, len(found), _WRITES):
            states = {key: KeyState(version=version) for key, version in found[first : first + _WRITES]}
            effect(removal_of(name), partial(save_states, run, stage, states))
        run.emptied.add((name, topic_ids[topic]))


def unfinished(run: Run) -> dict[str, dict[int, int]]:
    """Next offset, by topic and partition, up to which a batch was begun and is not committed."""
    manifest = run.manifest
    return {} if manifest is None else unread(manifest.unfinished, manifest.positions)


def batch_to_repeat(run: Run) -> dict[TopicPartition, int]:
    """Next offset after a batch that has to be repeated as it was, for the partitions that it reads; empty for none."""
    return unfinished_places(run) if run.flow.repeats_batches else {}


def unfinished_places(run: Run) -> dict[TopicPartition, int]:
    """`unfinished` by partition."""
    return {TopicPartition(topic, number): end for topic, its in unfinished(run).items() for number, end in its.items()}


def forget_beyond(run: Run, ends: Mapping[TopicPartition, int]) -> None:
    """Forget what an unfinished batch read beyond the ends of the log: the broker lost it, and nobody reads it again."""
    if (manifest := run.manifest) is not None and manifest.unfinished:
        kept = {
            topic: {number: min(end, ends.get(TopicPartition(topic, number), end)) for number, end in its.items()}
            for topic, its in manifest.unfinished.items()
        }
        run.manifest = msgspec.structs.replace(manifest, unfinished=kept)


def part_to_finish(run: Run) -> Flow[Any] | None:
    """The part of the flow that has to be read before any other; None if no batch is unfinished."""
    return next((run.flow.part_of(topic) for topic in unfinished(run)), None)


def check_turn(run: Run, part: Flow[Any]) -> None:
    """Check that a part of the flow may be read.

    Raises:
        RunRefusedError: A batch of another part is unfinished.
    """
    first = part_to_finish(run)
    if first is not None and first.topics.keys() != part.topics.keys():
        places = [
            f"{topic}:{number} up to {end}" for topic, ends in unfinished(run).items() for number, end in ends.items()
        ]
        raise RunRefusedError(
            f"flow {run.flow.name}: a crashed run may have folded records of {', '.join(places)}. Pass them before records "
            f"of {', '.join(part.topics)}: they look up the tables as they are now"
        )


class Turns:
    """Which part of a flow the next batch reads.

    An unfinished batch comes first. Then every table is read up to its end at the start of the run, so that a new flow
    does not look up empty tables. After that, tables and main line take turns.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._goal: dict[TopicPartition, int] = {}
        self._turn = -1

    def begin(self, ends: Mapping[TopicPartition, int]) -> None:
        """Note the ends of the topics at the start of the run."""
        tables = {topic for part in self._run.flow.tables.values() for topic in part.topics}
        self._goal = {place: end for place, end in ends.items() if place.topic in tables}

    def next(self, waiting: Sequence[str]) -> Flow[Any] | None:
        """The part to read.

        Args:
            waiting: Topics that have records to read.

        Returns:
            The part; None if nothing waits.
        """
        if (first := part_to_finish(self._run)) is not None:
            return first
        start = self._run.start
        behind = {place.topic for place, end in self._goal.items() if start.get(place, 0) < end}
        parts = self._run.flow.parts
        for number in (number % len(parts) for number in range(self._turn + 1, self._turn + 1 + len(parts))):
            topics = parts[number].topics.keys()
            if topics & waiting and (topics & behind or not behind.intersection(waiting)):
                self._turn = number
                return parts[number]
        return None

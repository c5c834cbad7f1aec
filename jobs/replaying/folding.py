"""How the records of a rebuild are folded, and what leaves the stores: everything that a swap needs of Kafka."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from aggregations.definition.flow import Flow
from aggregations.engine.archived import topics_with_archive
from aggregations.engine.options import Rebuilding, RunOptions, outputs_of
from aggregations.report import Report
from aggregations.run.growth import unread_growths
from aggregations.run.plan import Plan
from aggregations.run.risks import refuse
from aggregations.run.start import EARLIEST, Starts
from jobs.replaying.beginning import fill_from_snapshot
from jobs.replaying.generations import Generations
from jobs.replaying.leaving import drop_letters, send_letters, send_outputs, send_states
from jobs.replaying.planning import deleted_records, ranges_of, starts_of, topics_since
from jobs.snapshot_places import Place
from persistence.kafka import KafkaSettings, Topics
from persistence.manifest import Manifest, Rebuilt
from persistence.pointer import Pointer

Runner = Callable[..., Report]
"""`run_local`, or `run_flow` with what Spark needs."""


class Outside(Protocol):
    """What a swap does outside of the pointer."""

    def fold(self, found: Generations, pointer: Pointer, note: Rebuilt) -> Report:
        """Fold the rebuild up to what the live generation has read."""
        ...

    def send_letters(self, found: Generations, generation: int) -> int:
        """Send the dead letters that the rebuild held, and return their number."""
        ...

    def drop_letters(self, found: Generations, generation: int, note: Rebuilt) -> int:
        """Give up the dead letters that the rebuild held, and return their number."""
        ...

    def send_outputs(self, found: Generations, generation: int) -> int:
        """Send the outputs that the rebuild held, and return their number."""
        ...

    def send_states(self, found: Generations, generation: int, before: int) -> int:
        """Publish the states that the flow publishes, and return their number; remove those of the generation before."""
        ...

    def unread_growths(self, found: Generations, generation: int) -> list[str]:
        """The topics with added partitions of which a generation has not read all that may be in the wrong one."""
        ...

    def stopped(self) -> bool:
        """Whether the command was asked to end."""
        ...


def growths_of(manifest: Manifest | None, kafka: KafkaSettings) -> list[str]:
    """The topics whose growth is not over at the end of a run; see `aggregations.run.growth`.

    Raises:
        BrokerError: Kafka does not answer, or refuses a request.
    """
    if manifest is None or not manifest.growth:
        return []
    topics = Topics(kafka)

    def ends(topic: str) -> dict[int, int]:
        return {partition: end for (_, partition), end in topics.ends([topic]).items()}

    return unread_growths(manifest, time.time_ns() // 1_000_000, ends)


@dataclass(frozen=True, slots=True)
class Folding:
    """Folds records of Kafka with a runner; the attributes are the arguments of `jobs.replay.rebuild`, its options bound."""

    flow: Flow[Any]
    options: RunOptions
    runner: Runner
    progress: Callable[[Report], None] | None
    planned: Callable[[Plan], None] | None
    stop: threading.Event
    snapshot: Place | None = None

    def check(self) -> None:
        """Check the arguments, and the topics that the swap sends to, before anything is written.

        Raises:
            FlowError: The flow reads or publishes to the dead-letter topic, or a store is in memory.
            BrokerError: A topic does not exist, or this user may not write it.
        """
        options = self.options.checked(self.flow)
        letters = [] if options.dead_letters is None else [options.dead_letters]
        Topics(options.broker).check_rights(write=[*outputs_of(self.flow), *letters])

    def fold(self, found: Generations, pointer: Pointer, note: Rebuilt) -> Report:
        """Fold the rebuild up to what the live generation has read."""
        assert pointer.rebuild is not None
        generation, live = pointer.rebuild.generation, pointer.live
        topics = topics_with_archive(self.options, self.flow)
        fill_from_snapshot(found, pointer.rebuild, note, self.snapshot)
        refuse(topics_since(found, live, generation), self.options.accept)
        ranges = ranges_of(found, live, generation, topics)
        refuse(deleted_records(found, ranges, topics), self.options.accept)
        begun = {topic for topic, _ in found.positions(generation)}  # a crash may leave only some topics begun
        start: Starts = starts_of([one for one in ranges if one.topic not in begun], topics) or EARLIEST
        known = found.progress(live)
        until = {place: one.next_offset for place, one in known.items()}
        # What the live generation does not look up is read to its end, before anything looks it up.
        tables = {topic for part in self.flow.tables.values() for topic in part.topics} - {one.topic for one in known}
        until |= topics.ends(sorted(tables)) if tables else {}
        options = replace(
            self.options,
            generation=generation,
            start=start,
            until_caught_up=True,
            rebuilding=Rebuilding(
                note,
                until,
                pointer.rebuild.outputs,
                {place: one.branches for place, one in known.items() if one.branches},
            ),
        )
        return self.runner(self.flow, options, progress=self.progress, planned=self.planned, stop=self.stop)

    def send_letters(self, found: Generations, generation: int) -> int:
        """Send the dead letters that the rebuild held, and return their number."""
        return send_letters(found, generation, self.options.broker)

    def drop_letters(self, found: Generations, generation: int, note: Rebuilt) -> int:
        """Give up the dead letters that the rebuild held, and return their number."""
        return drop_letters(found, generation, note)

    def send_outputs(self, found: Generations, generation: int) -> int:
        """Send the outputs that the rebuild held, and return their number."""
        return send_outputs(found, generation, self.options.broker)

    def send_states(self, found: Generations, generation: int, before: int) -> int:
        """Publish the states that the flow publishes, and return their number; remove those of the generation before."""
        return send_states(found, generation, before, self.options.broker)

    def unread_growths(self, found: Generations, generation: int) -> list[str]:
        """The topics with added partitions of which a generation has not read all that may be in the wrong one."""
        return growths_of(found.manifest(generation), self.options.broker)

    def stopped(self) -> bool:
        """Whether the command was asked to end."""
        return self.stop.is_set()

"""Start of a run: permissions, preflight, epoch, and the plan from manifests, broker and consumer group."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from aggregations.definition.flow import Flow
from aggregations.engine.archive import Archive
from aggregations.engine.archived import archived, gaps, topics_with_archive
from aggregations.engine.options import RunOptions, outputs_of
from aggregations.engine.ranges import Range
from aggregations.engine.retry import StoppedError, may_pass
from aggregations.run.begin import begin, look
from aggregations.run.consistency import check_durability
from aggregations.run.incarnations import NO_ID
from aggregations.run.live import check_live
from aggregations.run.plan import Broker, Plan, plan
from aggregations.run.risks import Risk, refuse
from aggregations.run.run import Run
from aggregations.run.start import EARLIEST, offsets, start_of
from aggregations.run.turns import forget_beyond, unfinished_places
from envelope import TopicPartition
from persistence.compaction import compaction
from persistence.findings import Finding
from persistence.kafka import Topics
from persistence.kafka.errors import rejects_login
from persistence.kafka.facts import TopicFacts, Watermarks
from persistence.kafka.topics import former_ends
from persistence.registry import preflight

T = TypeVar("T")

_LOG = logging.getLogger("headwater.engine")
WAIT_SECONDS = 60.0
"""For how long a start asks again while a server does not answer: `default.api.timeout.ms` of Kafka's Java clients."""
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Opening:
    """A run that passed all checks.

    Attributes:
        topics: Administrative access to topics; None without access to the broker.
        run: The run, which holds the epoch.
        plans: Where each partition starts, for each source.
        archive: The archive that is read before Kafka; None for none.
        largest: Largest record that can be produced to an output topic, in bytes, by topic.
    """

    topics: Topics | None
    run: Run
    plans: Sequence[Plan]
    archive: Archive | None = None
    largest: Mapping[str, int] = field(default_factory=dict)

    @property
    def broker(self) -> Topics:
        """Administrative access to topics, of a run that has it."""
        assert self.topics is not None
        return self.topics

    @property
    def topic_ids(self) -> dict[str, str]:
        """The sources' current topic ids."""
        known = {one.topic: one.topic_id for one in self.plans}
        return known or {topic: self.run.topic_ids.get(topic, NO_ID) for topic in self.run.sources}


def _answer(ask: Callable[[], T], stop: threading.Event) -> T:
    """What servers answer; while one does not, ask all of them again."""
    deadline, warned = time.monotonic() + WAIT_SECONDS, ""
    while not stop.is_set():
        try:
            return ask()
        except Exception as error:
            left = deadline - time.monotonic()
            if left < 0 or not may_pass(error) or rejects_login(error):
                raise
            if str(error) != warned:
                _LOG.warning("start: %s. Trying again for up to %.0f s", error, left)
            warned = str(error)
        stop.wait(_PAUSE_SECONDS)
    raise StoppedError


def open_run(
    flow: Flow[Any],
    options: RunOptions,
    *,
    planned: Callable[[Plan], None] | None = None,
    only_looks: bool = False,
    reads: bool = True,
    ends: Mapping[TopicPartition, int] | None = None,
    stop: threading.Event | None = None,
) -> Opening:
    """Acquire an epoch, read the manifests, compare them with the broker, decide where to start, and note it.

    Args:
        flow: The flow.
        options: Options bound to it.
        planned: Called once for each source with its plan: where each partition starts.
        only_looks: Acquire no epoch and write nothing; all checks that could refuse the run are still made.
        ends: Where the run stops in each partition, for the check of an archive; None for no end, or that of the rebuild.
        reads: The run reads the topics itself, so that a partition that was never read begins where its log does. Otherwise
            it begins at offset 0: something else may deliver what the log no longer has.
        stop: Servers that do not answer are asked again, for `WAIT_SECONDS` or until this is set; None to ask once, as a
            rebuild does in any case. The wait ends before an epoch is acquired: a start that waits fences nobody.

    Raises:
        StoppedError: `stop` was set.
        RunRefusedError: It would be unsafe to continue and the risk is not accepted.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or refuses a request.
    """
    if options.kafka is None:
        return _without_broker(flow, options, stop=stop)
    stores, accept, journal, rebuilding = options.urls, options.accept, options.journal, options.rebuilding
    sources, topics = list(flow.topics), topics_with_archive(options, flow)
    outputs = outputs_of(flow)
    written = [*outputs, *filter(None, (options.dead_letters, journal))] if options.sends else []
    streams = list(flow.parts[-1].topics)  # of a table, compaction keeps what is needed

    def ask() -> tuple[dict[str, TopicFacts], dict[str, int], list[list[Finding]]]:
        facts = topics.describe(sources)
        topics.check_rights(read=sources, write=written)
        missing = topics.missing(outputs)  # a run that sends nothing needs none of them
        largest = topics.max_message_bytes(one for one in outputs if one not in missing)
        policies = compaction(topics.cleanup_policies(streams))
        return facts, largest, [policies, *map(preflight, dict.fromkeys(stores.values()))]

    facts, largest, findings = ask() if stop is None or rebuilding is not None else _answer(ask, stop)
    for found in findings:
        refuse(found, accept)
        for finding in found:
            _LOG.warning("%s", finding)
    for topic, policy in topics.cleanup_policies(filter(None, [journal])).items():
        if "compact" in (policy or ""):
            _LOG.warning(
                "journal %s: cleanup.policy=%s keeps only the newest entry of each flow. Set it to delete",
                topic,
                policy,
            )
    with ExitStack() as stack:
        if only_looks:
            run = look(flow, stores, generation=options.generation, accept=accept)
        else:
            note = None if rebuilding is None else rebuilding.note
            run = begin(flow, stores, generation=options.generation, accept=accept, rebuilt=note)
        stack.callback(run.close)
        if only_looks:
            check_live(run)
        refuse(check_durability([(name, one.capabilities) for name, one in run.distinct_stores()]), accept)
        committed = {} if options.group is None else topics.group_offsets(options.group, sources)
        marks = topics.marks(sources)
        plans = []
        for source in sources:
            its = {place.partition: one for place, one in marks.items() if place.topic == source}
            broker = Broker(
                source,
                NO_ID if run.unasked and run.topic_ids.get(source, NO_ID) == NO_ID else facts[source].topic_id,
                {partition: (one.low, one.high) for partition, one in its.items()},
                {partition: offset for (name, partition), offset in committed.items() if name == source},
                time.time_ns() // 1_000_000,
                {number: one.leader_epoch for number, one in its.items() if one.leader_epoch is not None},
                _epoch_ends(topics, run, source, facts[source].topic_id, marks),
            )
            begin_at = start_of(options.start, source, table=source not in streams)
            if isinstance(begin_at, Mapping) and not (ends is None and rebuilding is None):
                # The caller may not know partitions that were added since it looked.
                begin_at = {**{partition: low for partition, (low, _) in broker.marks.items()}, **begin_at}
            given = partial(offsets, begin_at, source, broker.marks, partial(topics.offsets_at, source))
            decided = plan(
                *(flow.name, run.manifest, run.manifests, broker),
                publishes=options.keeps_order(flow),
                crashed=run.crashed,
                starting_offsets=None if begin_at == EARLIEST else given,
                branches={
                    place.partition: known
                    for place, known in (rebuilding.branches if rebuilding else {}).items()
                    if place.topic == source
                },
            )
            plans.append(decided)
            if planned is not None:
                planned(decided)
        # What the log no longer has may still be delivered; what is not is noticed then.
        left = [one for made in plans for one in made.findings if reads or one.risk != Risk.LOST_RECORDS]
        refuse(left, accept)
        ends = rebuilding.until if ends is None and rebuilding is not None else ends
        read = [
            Range(partition, first, marks[place].high if ends is None else ends.get(place, 0), place.topic)
            for one in plans
            for partition, first in one.starts.items()
            for place in [TopicPartition(one.topic, partition)]
        ]
        refuse(gaps(flow.name, archived(topics), read), accept)
        highs = {place: one.high for place, one in marks.items()}
        # A rebuild that crashed read no further than the live generation was, which has not gone back since.
        run.doubted(highs if rebuilding is None else {**rebuilding.until})
        if not only_looks:
            anew = _written_anew(run, plans)
            for one in plans:
                run.start_at(
                    one.topic,
                    one.topic_id,
                    one.starts if reads else _delivered_from(run, one),
                    one.growth,
                    one.starting_offsets,
                    one.logs,
                )
            forget_beyond(run, {place: min(high, anew.get(place, high)) for place, high in highs.items()})
        stack.pop_all()
        return Opening(topics, run, plans, archived(topics), largest)


def _epoch_ends(
    topics: Topics, run: Run, topic: str, topic_id: str, marks: Mapping[TopicPartition, Watermarks]
) -> dict[int, int]:
    """Where the records of the noted leader epochs end, by partition whose leader has another one now."""
    read = {place: one.leader_epoch for place, one in run.logs({topic: topic_id}).items() if place in marks}
    ends = former_ends(topics, read, {place: marks[place].leader_epoch for place in read})
    return {place.partition: end for place, end in ends.items()}


def _written_anew(run: Run, plans: Sequence[Plan]) -> dict[TopicPartition, int]:
    """Offsets from which logs were written anew since their branches were noted: no run has read these records."""
    before = {} if run.manifest is None else run.manifest.positions
    return {
        TopicPartition(one.topic, partition): min(first for first, _ in new)
        for one in plans
        for partition, log in one.logs.items()
        if (noted := before.get(one.topic, {}).get(partition)) and (new := {*log.branches} - {*noted.branches})
    }


def _delivered_from(run: Run, plan: Plan) -> dict[int, int]:
    """The positions of a topic that something else reads: those of the manifest, and 0 for partitions that nobody has read."""
    before = run.manifest
    again = before is not None and before.topic_ids.get(plan.topic, plan.topic_id) != plan.topic_id
    known = {} if again else run.positions(plan.topic)
    # If the log was cut below the position, what was written since is delivered again from there on.
    return {
        one.partition: min(known.get(one.partition, 0), one.first)
        for one in plan.partitions
        if one.partition not in plan.waiting
    }


def _without_broker(flow: Flow[Any], options: RunOptions, *, stop: threading.Event | None) -> Opening:
    """A run whose records something else reads, and which knows of them only what its stores and its batches say."""

    def ask() -> list[list[Finding]]:
        return [*map(preflight, dict.fromkeys(options.urls.values()))]

    for found in ask() if stop is None else _answer(ask, stop):
        refuse(found, options.accept)
        for finding in found:
            _LOG.warning("%s", finding)
    run = begin(flow, options.urls, generation=options.generation, accept=options.accept, notes=True)
    with ExitStack() as stack:
        stack.callback(run.close)
        refuse(check_durability([(name, one.capabilities) for name, one in run.distinct_stores()]), options.accept)
        begun = unfinished_places(run)
        run.crashed = run.crashed and bool(begun)
        run.doubted(begun)
        if run.manifest is None:
            run.note(run.changed())
        stack.pop_all()
    return Opening(None, run, ())

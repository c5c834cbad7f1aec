"""The republish service: consume, transform, produce, flush, then commit."""

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from envelope import Limits
from envelope.filters.arrival import Filter
from envelope.filters.sequence_maps import EVERYWHERE, DedupPolicy
from envelope.limits import DEFAULT_LIMITS
from jobs.environment import UsageError
from jobs.republish.absence import TOPIC_WAIT_SECONDS, Absence, Places, Unsafe, is_absence
from jobs.republish.counts import OnStatistics, Statistics
from jobs.republish.filtering import OWNER, Overtaken, RecordFilter, check_rule
from jobs.republish.growth_watch import GrowthWatch
from jobs.republish.loop import Loop
from jobs.republish.offsets import PATIENCE_SECONDS, MemberFenced
from jobs.republish.place import await_place
from jobs.republish.processor import MAX_OUTPUTS, Processor
from jobs.republish.record import Transform
from jobs.republish.retry import NO_RETRIES, RetryTopics
from jobs.republish.roots import RootEnds
from jobs.republish.source import InputTopics
from jobs.republish.topic_check import TopicReplaced
from persistence.compaction import COMPACTED_SOURCE, compaction
from persistence.growth import GROWN_UNDRAINED, METADATA_MAX_AGE_SECONDS
from persistence.kafka import AcknowledgedProducer, BrokerError, KafkaSettings, Topics
from persistence.kafka.facts import BEYOND_END
from persistence.kafka.producer import batch_bytes
from persistence.names import FlowRef
from persistence.protocol import StateStore
from persistence.registry import preflight, risks

_LOG = logging.getLogger("headwater.republish")

_RISKS: Final = (COMPACTED_SOURCE, GROWN_UNDRAINED, BEYOND_END)
_START_SECONDS: Final = 10.0  # to wait for a broker at the start


class Republisher:
    """A service that reads topics, transforms each record and produces the outputs. It has no state but that of a filter.

    Every output contains the input's source chain plus one hop, so a flow downstream recognises
    messages that are produced twice (after a crash, a rebalance or a rewind). The order of work is:

    1. consume records,
    2. transform them; records that cannot be used are set aside,
    3. produce the outputs with an idempotent producer, partitioned like the Java client,
    4. flush: every output is acknowledged by all in-sync replicas,
    5. produce and flush the dead letters,
    6. write the states of the filter, if there is one, each with the position that it covers,
    7. commit the input offsets.

    A crash between any two steps repeats messages with the same chain and index; it loses none.

    Args:
        transform: Called with each record; returns None, an `OutputRecord` or several. It must be deterministic: the same
            record gives the same outputs in the same order.
        source: Topic name (of envelopes) or `InputTopics`.
        target: Topic to produce to, or several: `OutputRecord.topic` chooses, the first is the default.
        name: Name of this republisher, the hop's `via`. Part of every message's path: do not change it.
        settings: Settings of the Kafka cluster.
        group: Consumer group; `name` when None.
        dead_letter: Topic for records that cannot be used. Without one such a record stops the service.
        retry: Topics for records whose transform failed.
        batch_size: Maximum number of records between two commits.
        max_wait: Maximum number of seconds between two commits.
        drain: Seconds that a stop may take until the records in flight are acknowledged.
        limits: Limits of envelopes.
        cluster: Name of the Kafka cluster that is read, when there is more than one: part of every message's chain, do not
            change it.
        source_settings: Settings of the cluster that is read, if it is another one than that of the target. The
            dead-letter topic is in the cluster of the target.
        target_cluster: Name of the target's cluster, if messages that came from it may return to it.
        check_roots: Reject a record whose root lies beyond the end of its topic. Costs some milliseconds whenever
            a root is newer than those seen before; a flow always checks this.
        topic_wait: Seconds to wait for a topic that does not exist, at the start or after it was deleted; 0 for no
            wait, infinity for no limit.
        metadata_max_age: Seconds for which producers of the source may not know of new partitions: the largest
            `metadata.max.age.ms` of all producers.
        accept: Names of accepted risks: `beyond-end`, `compacted-source`, `grown-undrained`.
        max_outputs: Maximum number of outputs of one input.
        roots: Topics that a chain may begin with; None for any.
        headers_mirror: Write the envelope's mirror into headers.
        mark_destination: Write the target topic into every envelope, not only into those that name one.
        deduplicate: A filter that drops duplicates before the transform. It has a state for each partition that is read.
        policy: Topics whose records the filter judges. Those of other topics are passed on, as `unidentified`.
        store: Store of the filter's states, or its URL. All members of the group use the same one.
        generation: Another generation of the filter begins without states.

    Attributes:
        statistics: Counts of the current or last run.

    Raises:
        UsageError: A topic is both read and written, a name or target is missing, a risk in `accept` does not exist, or the
            filter needs a store or other states than those of partitions.
    """

    def __init__(
        self,
        transform: Transform,
        *,
        source: str | InputTopics,
        target: str | Sequence[str],
        name: str,
        settings: KafkaSettings,
        group: str | None = None,
        dead_letter: str | None = None,
        retry: RetryTopics = NO_RETRIES,
        batch_size: int = 50_000,
        max_wait: float = 1.0,
        drain: float = 30.0,
        limits: Limits = DEFAULT_LIMITS,
        cluster: str = "",
        source_settings: KafkaSettings | None = None,
        target_cluster: str = "",
        check_roots: bool = False,
        topic_wait: float = TOPIC_WAIT_SECONDS,
        metadata_max_age: float = METADATA_MAX_AGE_SECONDS,
        accept: Collection[str] = (),
        max_outputs: int = MAX_OUTPUTS,
        roots: Iterable[str] | None = None,
        headers_mirror: bool = False,
        mark_destination: bool = False,
        deduplicate: Filter[Any] | None = None,
        policy: DedupPolicy = EVERYWHERE,
        store: StateStore | str | None = None,
        generation: int = 1,
    ) -> None:
        self.statistics = Statistics()
        self._transform = transform
        self._source = InputTopics((source,)) if isinstance(source, str) else source
        self._targets = (target,) if isinstance(target, str) else tuple(target)
        self._name = name
        self._settings = settings
        self._group = group or name
        self._dead_letter = dead_letter
        self._retry = retry
        self._batch_size = batch_size
        self._max_wait = max_wait
        self._drain = drain
        self._limits = limits
        self._cluster = cluster
        self._source_settings = source_settings or settings
        self._check_roots = check_roots
        self._topic_wait = topic_wait
        self._metadata_max_age = metadata_max_age
        self._accept = frozenset(accept)
        self._rule, self._policy = deduplicate, policy
        self._store = store
        self._generation = generation
        self._options: dict[str, Any] = {
            "max_outputs": max_outputs,
            "roots": roots,
            "headers_mirror": headers_mirror,
            "mark_destination": mark_destination,
            "target_cluster": target_cluster if source_settings else cluster,
        }
        self._stop = threading.Event()
        self._inputs = (*self._source.topics, *retry.delays)
        self._outputs = (*self._targets, *retry.delays, *((dead_letter,) if dead_letter else ()))
        if not self._targets or not name:
            raise UsageError("a republisher needs a name and a target topic")
        if source_settings and (retry.delays or not cluster):
            raise UsageError(
                "a republisher between two clusters needs the name of the one that it reads (cluster=), and has no retry "
                "topics, which it would read and write in different clusters"
            )
        both = () if source_settings else sorted(set(self._inputs) & {*self._targets, dead_letter})
        if both:
            raise UsageError(
                f"{', '.join(both)} is read and written: messages would loop forever; write to another topic"
            )
        known = (*_RISKS, *(sorted(risks(store)) if isinstance(store, str) else ()))
        if unknown := sorted(self._accept - {*known}):
            raise UsageError(f"unknown risk {', '.join(unknown)}; choose from {', '.join(known)}")
        self._check_filter()

    def _check_filter(self) -> None:
        if self._rule is None:
            if self._policy is not EVERYWHERE:
                raise UsageError("a policy says which topics a filter judges: name a filter (deduplicate=)")
            if self._store is not None:
                raise UsageError("a store is for the states of a filter: name a filter (deduplicate=)")
            return
        check_rule(self._rule)
        if not isinstance(self._policy, DedupPolicy):
            raise UsageError(f"policy= takes a DedupPolicy; got {self._policy!r}")
        if self._store is None:
            raise UsageError("a filter needs a store for its states, such as store='lmdb://states'")
        try:
            FlowRef(f"{OWNER}{self._group}", self._generation).stage(self._rule.name)
        except ValueError as error:
            raise UsageError(f"the filter's states are named after the group (group=): {error}") from error

    def stop(self) -> None:
        """Make `run` commit the records in flight and return, permanently. Safe in any thread or signal handler."""
        self._stop.set()

    def run(self, *, until_caught_up: bool = False, progress: OnStatistics | None = None) -> Statistics:
        """Republish until `stop` is called.

        Args:
            until_caught_up: Stop when everything that is in the source topics now has been republished.
            progress: Called after each commit, and when the growth of a topic begins, changes or ends.

        Raises:
            BrokerError: Kafka cannot be reached, refuses a request, or lacks a topic for too long. The next run
                reads uncommitted records again.
            StoreError: The store of the filter cannot be reached, or refuses a request; as for Kafka.
            Unsafe: A source topic is compacted, or has grown so that the order of its records cannot be kept, or the store
                of the filter may lose states.
        """
        self._check_store()
        self.statistics = Statistics()
        timeout, member_ids, growth = _START_SECONDS, set[str](), self._growth_watch(progress)
        while not self._stop.is_set():
            try:
                self._serve(timeout, member_ids, growth, until_caught_up, progress)
                break
            except MemberFenced as error:
                await_place(self._source_settings, self._group, member_ids, error)
                _LOG.warning("%s; no other process has taken its place in the group, so it rejoins", error.what)
            except (TopicReplaced, Overtaken) as error:
                _LOG.warning("%s; the group is joined again", error.what)
            except Unsafe:
                raise
            except BrokerError as error:
                if not is_absence(error, self._places):
                    raise
                self._absence(progress).wait(error)
            timeout = PATIENCE_SECONDS
        return self.statistics

    @property
    def _places(self) -> Places:
        if self._source_settings is self._settings:
            return [(self._settings, (*self._inputs, *self._outputs))]
        return [(self._source_settings, self._inputs), (self._settings, self._outputs)]

    def _absence(self, progress: OnStatistics | None) -> Absence:
        return Absence(
            self._places,
            patience=self._topic_wait,
            stop=self._stop,
            statistics=self.statistics,
            on_change=lambda: progress(self.statistics) if progress else None,
        )

    def _growth_watch(self, progress: OnStatistics | None) -> GrowthWatch:
        return GrowthWatch(
            self._source.topics,
            group=self._group,
            accepted=GROWN_UNDRAINED in self._accept,
            max_age=self._metadata_max_age,
            statistics=self.statistics,
            on_change=lambda: progress(self.statistics) if progress else None,
        )

    def _check_store(self) -> None:
        """Refuse a store that may lose the states of the filter.

        Raises:
            Unsafe: It may, and the risk is not accepted.
        """
        for finding in preflight(self._store) if isinstance(self._store, str) else ():
            if finding.unsafe and finding.risk not in self._accept:
                raise Unsafe(finding.what, f"{finding.remedy} (--accept {finding.risk})")
            _LOG.warning("%s", finding)

    def _judging(self, topics: Topics) -> RecordFilter | None:
        rule, store, ids = self._rule, self._store, topics.topic_ids
        if rule is None or store is None:
            return None
        return RecordFilter(
            rule,
            store,
            self._group,
            ids,
            policy=self._policy,
            generation=self._generation,
            cluster=self._cluster,
        )

    def _check_sources(self, topics: Topics) -> None:
        """Refuse topics whose records may be deleted before they are read.

        Raises:
            Unsafe: A topic is compacted, and the risk is not accepted.
        """
        for finding in compaction(topics.cleanup_policies(self._inputs)):
            if finding.unsafe and finding.risk not in self._accept:
                raise Unsafe(finding.what, f"{finding.remedy} (--accept {finding.risk})")
            _LOG.warning("%s", finding)

    def _serve(
        self,
        timeout: float,
        member_ids: set[str],
        growth: GrowthWatch,
        until_caught_up: bool,
        progress: OnStatistics | None,
    ) -> None:
        """Republish with new clients, from the committed offsets."""
        topics = Topics(self._source_settings, timeout=timeout)
        target = topics if self._source_settings is self._settings else Topics(self._settings, timeout=timeout)
        topics.check()
        target.check()
        topics.check_rights(read=self._inputs)
        target.check_rights(write=self._outputs)
        self._check_sources(topics)
        max_bytes = target.max_message_bytes(self._outputs)
        marks = topics.marks(self._source.topics) if until_caught_up else {}
        ends = {part: one.high for part, one in marks.items()} if until_caught_up else None
        roots = RootEnds(topics) if self._check_roots else None
        judging = self._judging(topics)
        processor = Processor(
            self._transform,
            via=self._name,
            source=self._source,
            targets={topic: max_bytes[topic] for topic in self._targets},
            retry_topics={topic: max_bytes[topic] for topic in self._retry.delays},
            limits=self._limits,
            is_beyond=roots.is_beyond if roots else None,
            **self._options,
        )
        # A producer batch must not be larger than the smallest limit of the targets.
        with AcknowledgedProducer(
            self._settings,
            arrays=processor.forwards and not judging,
            message_max_bytes=max(max_bytes.values()),
            batch_size=batch_bytes(max_bytes.values()),
        ) as producer:
            try:
                Loop(self, member_ids, growth, producer, max_bytes, ends, processor, progress, judging).run()
            finally:
                if judging and isinstance(self._store, str):
                    judging.close()

"""Start of a run: permissions, preflight, epoch, and the plan from manifests, broker and consumer group."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aggregations.definition.flow import Flow
from aggregations.definition.operators import Publish, PublishStates, flattened
from aggregations.engine.held import Rebuilding
from aggregations.engine.retry import StoppedError, may_pass
from aggregations.engine.sampling import ALL, check_share
from aggregations.errors import FlowError
from aggregations.run.begin import begin, look
from aggregations.run.consistency import check_durability
from aggregations.run.plan import Broker, Plan, plan
from aggregations.run.risks import check_accept, refuse
from aggregations.run.run import Run
from aggregations.run.start import EARLIEST, Starts, offsets, start_of
from aggregations.run.turns import forget_beyond
from persistence.compaction import compaction
from persistence.findings import Finding
from persistence.kafka import KafkaSettings, Topics
from persistence.kafka.errors import rejects_login
from persistence.kafka.facts import TopicFacts
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
        topics: Administrative access to topics.
        run: The run, which holds the epoch.
        plans: Where each partition starts, for each source.
    """

    topics: Topics
    run: Run
    plans: Sequence[Plan]

    @property
    def topic_ids(self) -> dict[str, str]:
        """The sources' current topic ids."""
        return {one.topic: one.topic_id for one in self.plans}


def check_arguments(
    flow: Flow[Any],
    stores: Mapping[str, str],
    accept: Sequence[str],
    *,
    dead_letters: str | None = None,
    journal: str | None = None,
    journal_share: float = ALL,
) -> None:
    """Refuse invalid combinations that need no answer from a server.

    Args:
        flow: The flow.
        stores: URL of the store by stage name.
        accept: Names of accepted risks.
        dead_letters: Dead-letter topic.
        journal: Topic of the flow's journal.
        journal_share: Share of the events that it lists.

    Raises:
        FlowError: States would end with the process, a risk does not exist, the share is invalid, or the flow reads what
            it publishes, or reads or publishes to the dead-letter topic or the journal.
    """
    if back := sorted({*outputs_of(flow)} & {one.topic.name for one in flow.inputs}):
        raise FlowError(
            f"flow {flow.name}: it publishes to {back[0]}, which it reads, so its outputs would come back; publish to "
            "another topic"
        )
    if dead_letters in flow.topics:
        raise FlowError(
            f"flow {flow.name}: --dead-letters {dead_letters} is the flow's source, so the flow would read its own dead "
            "letters; use a separate topic"
        )
    if dead_letters in outputs_of(flow):
        raise FlowError(
            f"flow {flow.name}: --dead-letters {dead_letters} is a topic that the flow publishes to, so its readers would "
            "receive dead letters; use a separate topic"
        )
    if journal is not None and journal in {*flow.topics, *outputs_of(flow), dead_letters}:
        raise FlowError(
            f"flow {flow.name}: --journal {journal} is a topic that the flow reads or writes; use a separate topic"
        )
    check_share("--journal-share", journal_share)
    for name, url in stores.items():
        if url.startswith("memory:"):
            raise FlowError(
                f"stage {name!r}: the states in {url} end with the process, and no other process can read them; use "
                "sqlite:///PATH or lmdb:///PATH"
            )
    check_accept(flow.name, stores, accept)


def outputs_of(flow: Flow[Any]) -> list[str]:
    """The topics that a flow publishes to."""
    return [
        topic
        for step in flattened(flow.every_step)
        if isinstance(step, Publish | PublishStates)
        for topic in step.targets
    ]


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
    *,
    kafka: KafkaSettings,
    stores: Mapping[str, str],
    dead_letters: str | None,
    journal: str | None = None,
    group: str | None,
    generation: int | None,
    accept: Sequence[str],
    planned: Callable[[Plan], None] | None = None,
    start: Starts = EARLIEST,
    only_looks: bool = False,
    sends: bool = True,
    rebuilding: Rebuilding | None = None,
    stop: threading.Event | None = None,
) -> Opening:
    """Acquire an epoch, read the manifests, compare them with the broker, decide where to start, and note it.

    Args: see `aggregations.spark.runner.run_flow`, and

        only_looks: Acquire no epoch and write nothing; all checks that could refuse the run are still made.
        sends: Outputs and dead letters are sent, and the group's offsets are known; otherwise `group` is None.
        rebuilding: The run is that of a rebuild.
        stop: Servers that do not answer are asked again, for `WAIT_SECONDS` or until this is set; None to ask once, as a
            rebuild does in any case. The wait ends before an epoch is acquired: a start that waits fences nobody.

    Raises:
        StoppedError: `stop` was set.
        RunRefusedError: It would be unsafe to continue and the risk is not accepted.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or refuses a request.
    """
    sources, topics = list(flow.topics), Topics(kafka)
    written = [*outputs_of(flow), *filter(None, (dead_letters, journal))] if sends else []
    streams = list(flow.parts[-1].topics)  # of a table, compaction keeps what is needed

    def ask() -> tuple[dict[str, TopicFacts], list[list[Finding]]]:
        facts = topics.describe(sources)
        topics.check_rights(read=sources, write=written)
        policies = compaction(topics.cleanup_policies(streams))
        return facts, [policies, *map(preflight, dict.fromkeys(stores.values()))]

    facts, findings = ask() if stop is None or rebuilding is not None else _answer(ask, stop)
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
            run = look(flow, stores, generation=generation, accept=accept)
        else:
            note = None if rebuilding is None else rebuilding.note
            run = begin(flow, stores, generation=generation, accept=accept, rebuilt=note)
        stack.callback(run.close)
        refuse(check_durability([(name, one.capabilities) for name, one in run.distinct_stores()]), accept)
        committed = {} if group is None else topics.group_offsets(group, sources)
        marks = topics.marks(sources)
        plans = []
        for source in sources:
            broker = Broker(
                source,
                facts[source].topic_id,
                {partition: (one.low, one.high) for (name, partition), one in marks.items() if name == source},
                {partition: offset for (name, partition), offset in committed.items() if name == source},
                time.time_ns() // 1_000_000,
            )
            begin_at = start_of(start, source, table=source not in streams)
            given = partial(offsets, begin_at, source, broker.marks, partial(topics.offsets_at, source))
            decided = plan(
                *(flow.name, run.manifest, run.manifests, broker),
                publishes=flow.keeps_order,
                starting_offsets=None if begin_at == EARLIEST else given,
            )
            plans.append(decided)
            if planned is not None:
                planned(decided)
        refuse([finding for one in plans for finding in one.findings], accept)
        ends = {place: one.high for place, one in marks.items()}
        # A rebuild that crashed read no further than the live generation was, which has not gone back since.
        run.doubted(ends if rebuilding is None else {**rebuilding.until})
        if not only_looks:
            for one in plans:
                run.start_at(one.topic, one.topic_id, one.starts, one.growth, one.starting_offsets)
            forget_beyond(run, ends)
        stack.pop_all()
        return Opening(topics, run, plans)

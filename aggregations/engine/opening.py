"""Start of a run: permissions, preflight, epoch, and the plan from manifests, broker and consumer group."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from aggregations.definition.flow import Flow
from aggregations.definition.operators import Publish, PublishStates, flattened
from aggregations.errors import FlowError
from aggregations.run.begin import begin, look
from aggregations.run.consistency import check_durability
from aggregations.run.plan import Broker, Plan, plan
from aggregations.run.risks import check_accept, refuse
from aggregations.run.run import Run
from aggregations.run.start import EARLIEST, Start, offsets
from envelope import TopicPartition
from persistence.compaction import compaction
from persistence.kafka import KafkaSettings, Topics
from persistence.registry import preflight

_LOG = logging.getLogger("headwater.engine")


@dataclass(frozen=True, slots=True)
class Opening:
    """A run that passed all checks.

    Attributes:
        topics: Administrative access to topics.
        run: The run, which holds the epoch.
        plan: Where each partition of the source starts.
    """

    topics: Topics
    run: Run
    plan: Plan


def check_arguments(
    flow: Flow[Any], stores: Mapping[str, str], accept: Sequence[str], *, dead_letters: str | None = None
) -> None:
    """Refuse invalid combinations that need no answer from a server.

    Args:
        flow: The flow.
        stores: URL of the store by stage name.
        accept: Names of accepted risks.
        dead_letters: Dead-letter topic.

    Raises:
        FlowError: States would end with the process, a risk does not exist, or the flow reads or publishes to the
            dead-letter topic.
    """
    if flow.topic is not None and dead_letters == flow.topic.name:
        raise FlowError(
            f"flow {flow.name}: --dead-letters {dead_letters} is the flow's source, so the flow would read its own dead "
            "letters; use a separate topic"
        )
    if dead_letters in outputs_of(flow):
        raise FlowError(
            f"flow {flow.name}: --dead-letters {dead_letters} is a topic that the flow publishes to, so its readers would "
            "receive dead letters; use a separate topic"
        )
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
        for step in flattened(flow.steps)
        if isinstance(step, Publish | PublishStates)
        for topic in (step.targets if isinstance(step, Publish) else (step.topic,))
    ]


def open_run(
    flow: Flow[Any],
    *,
    kafka: KafkaSettings,
    stores: Mapping[str, str],
    dead_letters: str | None,
    group: str,
    generation: int,
    accept: Sequence[str],
    planned: Callable[[Plan], None] | None = None,
    start: Start = EARLIEST,
    only_looks: bool = False,
) -> Opening:
    """Acquire an epoch, read the manifests, compare them with the broker, decide where to start, and note it.

    Args: see `aggregations.spark.runner.run_flow`, and

        only_looks: Acquire no epoch and write nothing; all checks that could refuse the run are still made.

    Raises:
        RunRefusedError: It would be unsafe to continue and the risk is not accepted.
        BrokerError: Kafka does not answer, or refuses a request.
        StoreError: A store does not answer, or refuses a request.
    """
    assert flow.topic is not None
    source = flow.topic.name
    topics = Topics(kafka)
    facts = topics.describe([source])[source]
    topics.check_rights(read=[source], write=[*outputs_of(flow), *([dead_letters] if dead_letters else [])])
    for found in (compaction(topics.cleanup_policies([source])), *map(preflight, dict.fromkeys(stores.values()))):
        refuse(found, accept)
        for finding in found:
            _LOG.warning("%s", finding)
    with ExitStack() as stack:
        run = (look if only_looks else begin)(flow, stores, generation=generation, accept=accept)
        stack.callback(run.close)
        refuse(check_durability([(name, one.capabilities) for name, one in run.distinct_stores()]), accept)
        committed = topics.group_offsets(group, [source])
        broker = Broker(
            source,
            facts.topic_id,
            {partition: (one.low, one.high) for (_, partition), one in topics.marks([source]).items()},
            {partition: offset for (_, partition), offset in committed.items()},
            time.time_ns() // 1_000_000,
        )
        given = partial(offsets, start, source, broker.marks, partial(topics.offsets_at, source))
        decided = plan(
            *(flow.name, run.manifest, run.manifests, broker),
            publishes=flow.publishes,
            starting_offsets=None if start == EARLIEST else given,
        )
        if planned is not None:
            planned(decided)
        refuse(decided.findings, accept)
        run.doubted({TopicPartition(source, partition): high for partition, (_, high) in broker.marks.items()})
        if not only_looks:
            run.start_at(source, facts.topic_id, decided.starts, decided.growth, decided.starting_offsets)
        stack.pop_all()
        return Opening(topics, run, decided)

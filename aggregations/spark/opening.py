"""Start of a run: permissions, preflight, epoch, and the plan from manifests, broker and consumer group."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from aggregations.definition.arguments import check_type
from aggregations.definition.flow import Flow
from aggregations.definition.operators import Publish, PublishStates
from aggregations.errors import FlowError
from aggregations.run.begin import begin, look
from aggregations.run.binding import bind
from aggregations.run.consistency import check_durability
from aggregations.run.plan import Broker, Plan, plan
from aggregations.run.risks import check_accept, refuse
from aggregations.run.run import Run
from aggregations.run.start import EARLIEST, Start, checked, offsets
from aggregations.spark.session import NEEDED
from envelope import TopicPartition
from persistence.compaction import compaction
from persistence.kafka import KafkaSettings, Topics
from persistence.registry import preflight

_LOG = logging.getLogger("headwater.spark")


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


def check_given(
    flow: Flow[Any],
    stores: Mapping[str, str],
    accept: Sequence[str],
    master: str,
    *,
    conf: Mapping[str, str] | None = None,
    dead_letters: str | None = None,
) -> None:
    """Refuse invalid combinations that need no answer from a server.

    Args:
        flow: The flow.
        stores: URL of the store by stage name.
        accept: Names of accepted risks.
        master: Spark's master.
        conf: Spark settings.
        dead_letters: Dead-letter topic.

    Raises:
        FlowError: Workers cannot reach a store, a risk does not exist, a Spark setting conflicts with the engine, or
            the flow reads or publishes to the dead-letter topic.
    """
    for name, value in (conf or {}).items():
        check_type(f"conf {name}", value, str, "text")
        if value.lower() != NEEDED.get(name, value).lower():
            raise FlowError(f"--conf {name}: the engine requires {NEEDED[name]}; remove this setting")
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
                f"stage {name!r}: {url} is local to one process, and Spark has several workers; use sqlite:///PATH"
            )
        if url.startswith(("sqlite:", "lmdb:")) and not master.startswith("local"):
            raise FlowError(
                f"stage {name!r}: {url} is a file of this machine, and Spark's workers ({master}) may run on others; "
                "use Redis or Cassandra, or --master local[N]"
            )
    check_accept(flow.name, stores, accept)


def outputs_of(flow: Flow[Any]) -> list[str]:
    """The topics that a flow publishes to."""
    return [step.topic for step in flow.steps if isinstance(step, Publish | PublishStates)]


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

    Args: see `aggregations.spark.engine.run_flow`, and

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


def plan_flow(
    flow: Flow[Any],
    *,
    kafka: KafkaSettings,
    stores: Mapping[str, str],
    dead_letters: str | None = None,
    group: str | None = None,
    generation: int = 1,
    accept: Sequence[str] = (),
    master: str = "local[2]",
    planned: Callable[[Plan], None] | None = None,
    start: Start = EARLIEST,
) -> Plan:
    """Where `run_flow` would start, by the same checks. It acquires no epoch and writes nothing: active runs continue.

    Requirements of Spark are not checked: Java, its jars, and whether workers can reach broker and stores.

    Args and errors: see `aggregations.spark.engine.run_flow`. `planned` gets the plan of a run that is refused
    because of it, too.
    """
    stores = bind(flow, stores)
    start = checked(start)
    check_given(flow, stores, accept, master, dead_letters=dead_letters)
    opening = open_run(
        flow,
        kafka=kafka,
        stores=stores,
        dead_letters=dead_letters,
        group=group or flow.name,
        generation=generation,
        accept=accept,
        planned=planned,
        start=start,
        only_looks=True,
    )
    opening.run.close()
    return opening.plan

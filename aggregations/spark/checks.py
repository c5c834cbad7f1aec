"""What is refused on Spark before any server is asked, and where a run on Spark would start."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aggregations.definition.arguments import check_type
from aggregations.definition.flow import Flow
from aggregations.engine.opening import check_arguments, open_run
from aggregations.engine.sampling import ALL
from aggregations.errors import FlowError
from aggregations.run.binding import bind
from aggregations.run.plan import Plan
from aggregations.run.start import EARLIEST, Starts, checked_starts
from aggregations.spark.session import NEEDED
from persistence.kafka import KafkaSettings


def check_given(
    flow: Flow[Any],
    stores: Mapping[str, str],
    accept: Sequence[str],
    master: str,
    *,
    conf: Mapping[str, str] | None = None,
    dead_letters: str | None = None,
    journal: str | None = None,
    journal_share: float = ALL,
) -> None:
    """Refuse invalid combinations that need no answer from a server.

    Args:
        flow: The flow.
        stores: URL of the store by stage name.
        accept: Names of accepted risks.
        master: Spark's master.
        conf: Spark settings.
        dead_letters: Dead-letter topic.
        journal: Topic of the flow's journal.
        journal_share: Share of the events that it lists.

    Raises:
        FlowError: Workers cannot reach a store, a risk does not exist, a Spark setting conflicts with the engine, the
            share is invalid, or the flow reads or publishes to the dead-letter topic or the journal.
    """
    for name, value in (conf or {}).items():
        check_type(f"conf {name}", value, str, "text")
        if value.lower() != NEEDED.get(name, value).lower():
            raise FlowError(f"--conf {name}: the engine requires {NEEDED[name]}; remove this setting")
    for name, url in stores.items():
        if url.startswith(("sqlite:", "lmdb:")) and not master.startswith("local"):
            raise FlowError(
                f"stage {name!r}: {url} is a file of this machine, and Spark's workers ({master}) may run on others; "
                "use Redis or Cassandra, or --master local[N]"
            )
    check_arguments(flow, stores, accept, dead_letters=dead_letters, journal=journal, journal_share=journal_share)


def plan_flow(
    flow: Flow[Any],
    *,
    kafka: KafkaSettings,
    stores: Mapping[str, str],
    dead_letters: str | None = None,
    group: str | None = None,
    generation: int | None = None,
    accept: Sequence[str] = (),
    master: str = "local[2]",
    planned: Callable[[Plan], None] | None = None,
    start: Starts = EARLIEST,
) -> Sequence[Plan]:
    """Where `run_flow` would start to read each source, by the same checks. Active runs continue.

    It acquires no epoch and writes nothing.

    Requirements of Spark are not checked: Java, its jars, and whether workers can reach broker and stores.

    Args and errors: see `aggregations.spark.runner.run_flow`. `planned` gets the plan of a run that is refused
    because of it, too.
    """
    stores = bind(flow, stores)
    start = checked_starts(start, flow.topics)
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
    return opening.plans

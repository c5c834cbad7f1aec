"""What is refused on Spark before any server is asked, and where a run on Spark would start."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aggregations.definition.arguments import check_type
from aggregations.definition.flow import Flow
from aggregations.engine.opening import open_run
from aggregations.engine.options import RunOptions
from aggregations.errors import FlowError
from aggregations.run.plan import Plan
from aggregations.spark.session import NEEDED


def check_given(
    flow: Flow[Any], options: RunOptions, master: str, *, conf: Mapping[str, str] | None = None
) -> RunOptions:
    """Refuse invalid combinations that need no answer from a server.

    Args:
        flow: The flow.
        options: Options of the run.
        master: Spark's master.
        conf: Spark settings.

    Returns:
        The checked options.

    Raises:
        FlowError: As for `RunOptions.checked`; or workers cannot reach a store, or a Spark setting conflicts with the
            engine.
    """
    bound = options.bound(flow)
    for name, value in (conf or {}).items():
        check_type(f"conf {name}", value, str, "text")
        if value.lower() != NEEDED.get(name, value).lower():
            raise FlowError(f"--conf {name}: the engine requires {NEEDED[name]}; remove this setting")
    for name, url in bound.urls.items():
        if url.startswith(("sqlite:", "lmdb:")) and not master.startswith("local"):
            raise FlowError(
                f"stage {name!r}: {url} is a file of this machine, and Spark's workers ({master}) may run on others; "
                "use Redis or Cassandra, or --master local[N]"
            )
    return bound.checked(flow)


def plan_flow(
    flow: Flow[Any],
    options: RunOptions,
    *,
    master: str = "local[2]",
    planned: Callable[[Plan], None] | None = None,
) -> Sequence[Plan]:
    """Where `run_flow` would start to read each source, by the same checks. Active runs continue.

    It acquires no epoch and writes nothing. Not checked are the journal and the requirements of Spark: Java, its jars,
    and whether workers can reach broker and stores.

    Args:
        flow: The flow.
        options: Options of the run.
        master: Spark's master.
        planned: Called once for each source with its plan, also if the run is refused because of it.

    Raises: see `aggregations.spark.runner.run_flow`.
    """
    options = check_given(flow, replace(options, journal=None), master)
    opening = open_run(flow, options, planned=planned, only_looks=True)
    opening.run.close()
    return opening.plans

"""`headwater plan`: where a run would start, and whether it would be refused."""

from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.errors import naming_topics
from jobs.cli.options import (
    STACK_ROOT,
    Accept,
    Bootstrap,
    DeadLetters,
    FlowName,
    Generation,
    Group,
    Json,
    KafkaFile,
    Root,
    StartAt,
    Stores,
    filled,
)
from jobs.cli.run import show_plan
from jobs.screen import say

if TYPE_CHECKING:
    from aggregations.run.plan import Plan


def plan(
    flow: FlowName,
    store: Stores = None,
    dead_letters: DeadLetters = None,
    group: Group = None,
    generation: Generation = None,
    start: StartAt = None,
    accept: Accept = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    master: Annotated[str, typer.Option(metavar="URL", help="Spark's master.", callback=filled)] = "local[2]",
    json: Json = False,
) -> None:
    """Show where a run would start, or why it is refused.

    It makes the checks of `headwater run`, with the same exit codes, except that a topic that does not exist is refused
    (3): `run` fails (1), so that its supervisor starts it again. An active run continues: this command takes no epoch,
    writes nothing and does not start Spark. With --json the plan of each source is one line, like the first lines of
    `headwater run --json`.
    """
    from aggregations.run.start import EARLIEST, parse_all
    from aggregations.spark.checks import plan_flow
    from jobs import settings
    from jobs.directory import Directory
    from jobs.loading import load_flow

    position = parse_all(start or [EARLIEST])
    found = load_flow(flow)
    here = Directory.load()
    kafka = settings.kafka(bootstrap, root, kafka_settings, directory=here)
    chosen = settings.of_flow(found, store, dead_letters=dead_letters, generation=generation, directory=here)
    for line in chosen.lines():
        say(line)
    made: list[Plan] = []
    try:
        with naming_topics():
            made = list(
                plan_flow(
                    found,
                    chosen.options(kafka=kafka, group=group, accept=accept or (), start=position),
                    master=master,
                    planned=made.append,
                )
            )
    finally:  # also shows the plans if the run is refused because of one
        for one in made:
            show_plan(one, json=json)

"""`headwater redrive`: sends dead letters back to their topics."""

from typing import Annotated

import typer

from jobs.cli.dead_letters import reasons, show
from jobs.cli.errors import naming_topics
from jobs.cli.options import (
    STACK_ROOT,
    Bootstrap,
    DeadLetterTopic,
    Json,
    KafkaFile,
    Reasons,
    RecordTopics,
    Root,
    Stages,
    filled,
)
from jobs.screen import progress


def redrive(
    source: DeadLetterTopic,
    apply: Annotated[
        bool, typer.Option("--apply", help="Redrive them. Without it: show what would be redriven.")
    ] = False,
    reason: Reasons = None,
    stage: Stages = None,
    topic: RecordTopics = None,
    application: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only from this flow or republisher; may be repeated.", show_default=False),
    ] = None,
    unproven: Annotated[
        bool,
        typer.Option(
            "--unproven",
            help="Include records rejected as unproven, below the floor: you assert that they were never folded.",
        ),
    ] = False,
    mend: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Function that is called with key and value and returns the value to send.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Send dead letters back to their topics. Each is folded once, even if it is redriven twice.

    The exit code is 4 if some cannot be redriven unchanged (damaged, trimmed, not an envelope): use --mend.
    """
    from jobs import settings
    from jobs.dead_letters.letters import Selection
    from jobs.dead_letters.redrive import redrive as run
    from jobs.loading import load_function

    selection = Selection(
        reasons(reason), frozenset(stage or ()), frozenset(topic or ()), frozenset(application or ()), unproven
    )
    with progress(f"reading {source}", unit="records") as bar, naming_topics():
        result = run(
            settings.kafka(bootstrap, root, kafka_settings),
            source,
            selection=selection,
            apply=apply,
            mend=load_function(mend) if mend else None,
            progress=bar,
        )
    show(
        result,
        done="redriven",
        written="produced",
        none="no dead letter matches the options",
        unusable="cannot be redriven: {}" if mend else "cannot be redriven unchanged: {}; see --mend",
        apply=apply,
        json=json,
    )

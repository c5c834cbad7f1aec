"""`headwater redrive`: dead letters back to where they died."""

from typing import Annotated

import typer

from jobs.cli.errors import Exit
from jobs.cli.options import Bootstrap, Json, KafkaFile, Letters, Reasons, Stages, Topics
from jobs.screen import emit, progress, say, table


def redrive(
    source: Letters,
    apply: Annotated[
        bool, typer.Option("--apply", help="Redrive them. Without it: show what would be redriven.")
    ] = False,
    reason: Reasons = None,
    stage: Stages = None,
    topic: Topics = None,
    application: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only of this flow or republisher; may be repeated.", show_default=False),
    ] = None,
    unproven: Annotated[
        bool,
        typer.Option("--unproven", help="Also what came back below the floor: you know that it was never folded."),
    ] = False,
    mend: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Called with key and value; returns the value to send.", show_default=False
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    json: Json = False,
) -> None:
    """Bring dead letters back to the topics where they died: each is folded once, also when it is redriven twice.

    The exit code is 4 when some cannot go back as they are (damaged, trimmed, no envelope): mend them.
    """
    from jobs import settings
    from jobs.letters import Selection
    from jobs.loading import load
    from jobs.redrive import redrive as run

    selection = Selection(
        frozenset(reason or ()), frozenset(stage or ()), frozenset(topic or ()), frozenset(application or ()), unproven
    )
    with progress("reading dead letters", unit="letters") as bar:
        result = run(
            settings.kafka(bootstrap, file=kafka_settings),
            source,
            selection=selection,
            apply=apply,
            mend=load(mend) if mend else None,
            progress=bar,
        )
    if json:
        emit(
            {
                "applied": apply,
                "letters": result.letters,
                "redriven": [
                    {"topic": where, "stage": at, "reason": why, "count": count}
                    for (where, at, why), count in sorted(result.redriven.items())
                ],
                "left": result.left,
                "foreign": result.foreign,
                "unusable": dict(result.unusable),
            }
        )
    else:
        table(
            ([where, at, why, count] for (where, at, why), count in sorted(result.redriven.items())),
            ["topic", "stage", "reason", "letters"],
            left=["topic", "stage", "reason"],
        )
        if result.unusable:
            say(f"{sum(result.unusable.values())} cannot go back as they are: {dict(result.unusable)}; see --mend")
        if not apply and result.redriven:
            say("nothing was produced; --apply does it")
    if result.unusable:
        raise typer.Exit(Exit.DIFFERENCES)

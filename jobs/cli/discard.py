"""`headwater discard`: gives up dead letters."""

from typing import Annotated

import typer

from jobs.cli.dead_letters import reasons, show
from jobs.cli.errors import naming_topics
from jobs.cli.options import (
    STACK_ROOT,
    Bootstrap,
    DeadLetterTopic,
    FlowName,
    Generation,
    Json,
    KafkaFile,
    Reasons,
    RecordTopics,
    Root,
    Stages,
    Stores,
)
from jobs.screen import counted, progress, say


def discard(
    flow: FlowName,
    source: DeadLetterTopic,
    apply: Annotated[
        bool, typer.Option("--apply", help="Discard them. Without it: show what would be discarded.")
    ] = False,
    reason: Reasons = None,
    stage: Stages = None,
    topic: RecordTopics = None,
    store: Stores = None,
    generation: Generation = None,
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Give up dead letters: fill their holes, fold nothing.

    Use it for dead letters that will never be redriven. They stay in their topic; one that is redriven afterwards is
    not folded.

    Stop the flow first: like a run, this command takes its epoch. The exit code is 4 if the key of some dead letters
    cannot be found.
    """
    from jobs import settings
    from jobs.dead_letters.discard import discard as run
    from jobs.dead_letters.letters import Selection
    from jobs.directory import Directory
    from jobs.loading import load_flow

    found = load_flow(flow)
    here = Directory.load()
    chosen = settings.of_flow(found, store, generation=generation, directory=here)
    selection = Selection(reasons(reason), frozenset(stage or ()), frozenset(topic or ()), unproven=True)
    with progress(f"reading {source}", unit="records") as bar, naming_topics():
        result = run(
            settings.kafka(bootstrap, root, kafka_settings, directory=here),
            source,
            found,
            chosen.stores,
            generation=chosen.generation,
            selection=selection,
            apply=apply,
            progress=bar,
        )
    if result.no_hole and not json:
        say(f"nothing to discard for {counted(result.no_hole, 'dead letter')}: no hole, or a filled one")
    show(
        result,
        done="discarded",
        written="written",
        none=f"no dead letter of flow {found.name}, generation {chosen.generation or 'live'}, matches the options",
        unusable="cannot be discarded, because their key is unknown: {}",
        apply=apply,
        json=json,
        no_hole=result.no_hole,
    )

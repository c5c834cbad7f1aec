"""`headwater snapshot` and `headwater restore`: the states of a flow in a file, and back."""

from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.options import FlowName, Generation, Json, Stores, path_of
from jobs.screen import counted, emit, progress, say, table


def snapshot(
    flow: FlowName,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The file.", parser=path_of)],
    replace: Annotated[bool, typer.Option("--replace", help="Replace the file if it exists.")] = False,
    store: Stores = None,
    generation: Generation = None,
    json: Json = False,
) -> None:
    """Save the states of a flow in a file.

    The file contains the states of all stages and the flow's progress, as of the end of one batch. It is a backup,
    from which `headwater restore` fills empty stores of any kind. It appears when it is complete.

    Stop the flow first. The exit code is 3 if a run is at work, or did not end cleanly.
    """
    from jobs import settings
    from jobs.backup import snapshot as save
    from jobs.loading import load_flow

    found = load_flow(flow)
    chosen = settings.of_flow(found, store, generation=generation)
    for line in chosen.lines():
        say(line)
    with progress(f"saving {to}", unit="states") as bar:
        saved = save(found, to, stores=chosen.stores, generation=chosen.generation, replace=replace, progress=bar)
    if json:
        emit(saved.as_json())
        return
    table(saved.states.items(), ["stage", "states"], left=["stage"])
    say(f"{to}: {counted(saved.bytes, 'byte')}, states after batch {saved.batch}, SHA-256 {saved.checksum}")


def restore(
    flow: FlowName,
    source: Annotated[
        Path,
        typer.Option("--from", metavar="FILE", help="The file that `headwater snapshot` wrote.", parser=path_of),
    ],
    store: Stores = None,
    generation: Generation = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RISK",
            help="Accept a risk for which it is refused: snapshot-versions.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Fill empty stores with the states of a snapshot.

    The flow must have the definition that made the states. The next run resumes where the snapshot ends. If it is
    interrupted, repeat it with the same file: until then no run begins.

    The exit code is 3 if a store is not empty, or the file is damaged or of another flow; nothing is written then.
    """
    from jobs import settings
    from jobs.backup import restore as put
    from jobs.loading import load_flow

    found = load_flow(flow)
    chosen = settings.of_flow(found, store, generation=generation)
    for line in chosen.lines():
        say(line)
    for stage, url in chosen.stores.items():
        settings.check_shared(f"the store of stage {stage}", url)
    with progress(f"restoring {source}", unit="states") as bar:
        done = put(
            found,
            source,
            stores=chosen.stores,
            generation=chosen.generation,
            accept=accept or (),
            progress=bar,
        )
    if json:
        emit(done.as_json())
        return
    table(done.states.items(), ["stage", "states"], left=["stage"])
    if done.expired:
        say(f"left out, because their time was over: {counted(done.expired, 'state')}")
    say(f"the next run resumes after batch {done.batch}")

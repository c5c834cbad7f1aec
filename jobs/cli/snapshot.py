"""`headwater snapshot` and `headwater restore`: the states of a flow in a file or a store, and back."""

from typing import Annotated

import typer

from jobs.cli.options import FlowName, Generation, Json, Stores, filled
from jobs.environment import UsageError
from jobs.screen import counted, emit, progress, say, table


def snapshot(
    flow: FlowName,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FILE|URL#NAME",
            help="A file, or a store and the name of the snapshot in it.",
            show_default=False,
            callback=filled,
        ),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(
            metavar="URL#NAME", help="Remove this snapshot from its store.", show_default=False, callback=filled
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the snapshot if it exists.")] = False,
    store: Stores = None,
    generation: Generation = None,
    json: Json = False,
) -> None:
    """Save the states of a flow in a file or a store.

    The snapshot contains the states of all stages and the flow's progress, as of the end of one batch. It is a backup,
    from which `headwater restore` fills empty stores of any kind. It appears when it is complete.

    Stop the flow first. The exit code is 3 if a run is at work, or did not end cleanly.
    """
    from jobs import settings
    from jobs.backup import snapshot as save
    from jobs.loading import load_flow
    from jobs.snapshot_places import place_of, shown, url_of
    from jobs.snapshot_places import remove as remove_from
    from persistence.registry import preflight

    if (to is None) is (remove is None):
        raise UsageError("give --to FILE, --to URL#NAME, or --remove URL#NAME")
    found = load_flow(flow)
    if remove is not None:
        remove_from(gone := place_of(remove), found.name)
        say(f"{shown(gone)} is removed")
        return
    place = place_of(to or "")
    if isinstance(place, str):
        settings.check_shared("the store of the snapshot", url_of(place), "--to")
        for finding in preflight(url_of(place)):
            say(f"the store of the snapshot: {finding}")
    chosen = settings.of_flow(found, store, generation=generation)
    for line in chosen.lines():
        say(line)
    with progress(f"saving {shown(place)}", unit="states") as bar:
        saved = save(found, place, stores=chosen.stores, generation=chosen.generation, replace=replace, progress=bar)
    if json:
        emit(saved.as_json())
        return
    table(saved.states.items(), ["stage", "states"], left=["stage"])
    say(f"{shown(place)}: {counted(saved.bytes, 'byte')}, states after batch {saved.batch}, SHA-256 {saved.checksum}")


def restore(
    flow: FlowName,
    source: Annotated[
        str,
        typer.Option(
            "--from", metavar="FILE|URL#NAME", help="Where `headwater snapshot` has saved them.", callback=filled
        ),
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
    interrupted, repeat it with the same snapshot: until then no run begins.

    The exit code is 3 if a store is not empty, or the snapshot is damaged or of another flow; nothing is written then.
    """
    from jobs import settings
    from jobs.backup import restore as put
    from jobs.loading import load_flow
    from jobs.snapshot_places import place_of, shown

    found = load_flow(flow)
    chosen = settings.of_flow(found, store, generation=generation)
    for line in chosen.lines():
        say(line)
    for stage, url in chosen.stores.items():
        settings.check_shared(f"the store of stage {stage}", url)
    place = place_of(source)
    with progress(f"restoring {shown(place)}", unit="states") as bar:
        done = put(
            found,
            place,
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

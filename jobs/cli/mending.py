"""`headwater replay --key`: states of chosen keys are mended in place."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from jobs.cli.comparing import show_differences
from jobs.cli.options import filled
from jobs.cli.refolding import told_of
from jobs.environment import UsageError
from jobs.screen import counted, emit, say, table

if TYPE_CHECKING:
    from aggregations.definition.flow import Flow
    from aggregations.engine.options import RunOptions
    from jobs.mending import Mended
    from jobs.snapshot_places import Place

KeysToMend: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        metavar="KEY",
        help="Mend the states of this key of --stage, in all its windows, instead of rebuilding the flow; may be repeated.",
        show_default=False,
    ),
]
StageToMend: TypeAlias = Annotated[
    str | None,
    typer.Option("--stage", metavar="NAME", help="The stage of --key.", show_default=False, callback=filled),
]


def mend_keys(
    flow: "Flow[Any]",
    options: "RunOptions",
    *,
    stage: str | None,
    keys: Sequence[str],
    apply: bool,
    reason: str | None,
    snapshot: "Place | None",
    sample: int,
    work: Path,
    json: bool,
) -> None:
    """Mend the states of these keys, or show what this would do."""
    if stage is None:
        raise UsageError("--key: give --stage NAME, the stage of the keys")
    if apply and reason is None:
        raise UsageError("--apply: give --reason, which is kept with the change")
    if reason is not None and not apply:
        raise UsageError("--key: --reason is for --apply; remove it")
    from jobs.mending import mend
    from jobs.table.view import key_of

    with told_of(f"folding the history of {flow.name}") as told:
        found = mend(
            *(flow, options),
            stage=stage,
            keys=[key_of(one) for one in keys],
            apply=apply,
            why=reason or "",
            snapshot=snapshot,
            sample=sample,
            work=work,
            progress=told,
        )
    if json:
        emit(found.as_json())
    else:
        _show(found)


def _show(found: "Mended") -> None:
    from jobs.table.view import key_as_text

    show_differences(found.comparison, "live", "folded")
    if found.mends:
        table(((key_as_text(key), what) for key, what in found.mends.items()), ["key", "mend"], left=["key", "mend"])
    say(f"{counted(found.folded.records, 'record')} folded, up to batch {found.batch}")
    if not found.mends:
        say("nothing to mend: the states are as their history makes them")
    elif not found.applied:
        say(f"{counted(len(found.mends), 'state')} to mend; nothing is written without --apply --reason TEXT")
    else:
        say(f"{counted(len(found.mends), 'state')} of stage {found.stage} mended in generation {found.generation}")
        if found.published:
            say(f"{counted(found.published, 'message')} with published states sent")
    if found.mends and found.later:
        say(f"not touched: {', '.join(found.later)}, whose states depend on this stage")

"""`headwater trace`: the records of a chain, from the root on."""

from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.errors import Exit
from jobs.cli.options import STACK_ROOT, Bootstrap, Json, KafkaFile, Root
from jobs.screen import counted, emit, say, table

if TYPE_CHECKING:
    from envelope import Hop


def trace(
    record: Annotated[str, typer.Argument(metavar="TOPIC:PARTITION:OFFSET", help="The record whose chain is read.")],
    bootstrap: Bootstrap = None,
    kafka_settings: KafkaFile = None,
    root: Root = STACK_ROOT,
    json: Json = False,
) -> None:
    """Show what a record was made of, and check its chain.

    Each record of the chain is read while it is retained: its own chain must be the beginning of this one, its
    timestamp the one that the hop names, and its key that of the output unless the hop says otherwise. No value is
    shown. With --json, a line per record.

    The exit code is 4 if a record contradicts the chain, and 3 if the named record does not exist or cannot be read. A
    record of the chain that retention has deleted contradicts nothing.
    """
    from jobs import settings
    from jobs.table.view import key_as_text
    from jobs.tracing import Found, place_of
    from jobs.tracing import trace as read

    steps = read(settings.kafka(bootstrap, root, kafka_settings), place_of(record))
    if json:
        for step in steps:
            emit(step.as_json())
    else:
        table(
            (
                [
                    str(step.place),
                    step.found.value,
                    None if step.key is None else key_as_text(step.key),
                    step.event_id,
                    "" if step.hop is None else step.hop.via,
                    _output(step.hop),
                ]
                for step in steps
            ),
            ["record", "found", "key", "event id", "republished by", "as output"],
            left=["record", "found", "key", "event id", "republished by"],
        )
    for step in steps:
        for why in step.wrong:
            say(f"{step.place}: {why}")
    if unread := sum(step.found not in (Found.FOUND, Found.BEYOND) for step in steps):
        say(f"not checked, because it cannot be read any more: {counted(unread, 'record')}")
    if any(step.wrong for step in steps):
        raise typer.Exit(Exit.DIFFERENCES)


def _output(hop: "Hop | None") -> str:
    """Which of the outputs of its input; a flow does not note how many there are."""
    if hop is None or hop.index is None:
        return ""
    return str(hop.index) if hop.count is None else f"{hop.index} of {hop.count}"

"""The reports of the commands for dead letters."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from jobs.cli.errors import Exit
from jobs.environment import UsageError
from jobs.screen import counted, emit, say, table

if TYPE_CHECKING:
    from jobs.dead_letters.letters import Handled


def reasons(given: Sequence[str] | None) -> frozenset[str]:
    """The values of `--reason`.

    Raises:
        UsageError: One of them is not a reason code.
    """
    from envelope import Reason

    known = [reason.value for reason in Reason]
    if unknown := sorted(set(given or ()) - set(known)):
        raise UsageError(f"--reason {unknown[0]}: unknown reason code; choose from {', '.join(known)}")
    return frozenset(given or ())


def show(
    result: "Handled", *, done: str, written: str, unusable: str, none: str, apply: bool, json: bool, **more: int
) -> None:
    """Write the result: one JSON object, or a table and lines for people.

    Args:
        result: The counts.
        done: Name of the action, and of its counts in the JSON object.
        written: Verb for applying the action.
        none: Text for a topic that contains no dead letter to handle.
        unusable: Text about dead letters that cannot be handled; `{}` in it stands for their counts by reason.
        apply: Whether the action was applied.
        json: Write the JSON object.
        more: Further numbers for it.

    Raises:
        typer.Exit: Code 4: some dead letters cannot be handled.
    """
    rows = [(*of, count, result.before[of]) for of, count in sorted(result.done.items())]
    names = ("topic", "stage", "reason", "count", "redriven_before")[: 5 if result.before else 4]
    if json:
        emit(
            {
                "applied": apply,
                "dead_letters": result.dead_letters,
                done: [dict(zip(names, row, strict=False)) for row in rows],
                **more,
                "left": result.left,
                "foreign": result.foreign,
                "unusable": dict(result.unusable),
            }
        )
    else:
        head = ["topic", "stage", "reason", "dead letters"]
        if result.before.total():
            table(rows, [*head, "redriven before"], left=head[:3])
        elif rows:
            table([row[:4] for row in rows], head, left=head[:3])
        if result.unusable:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(result.unusable.items()))
            say(f"{sum(result.unusable.values())} {unusable.format(reasons)}")
        if not result.dead_letters:
            say("the topic contains no dead letters")
        elif result.left == result.dead_letters:
            say(f"{none}: {counted(result.dead_letters, 'dead letter')} read")
        if not apply and rows:
            say(f"nothing was {written}: add --apply to do it")
    if result.unusable:
        raise typer.Exit(Exit.DIFFERENCES)

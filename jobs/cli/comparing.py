"""Shows the differences between two sets of states."""

from typing import TYPE_CHECKING

from jobs.screen import table

if TYPE_CHECKING:
    from jobs.comparing import Comparison


def show_differences(comparison: "Comparison", old: str, new: str) -> None:
    """Write tables of the differences by stage and by field, and of the sample.

    Args:
        comparison: The differences.
        old: What the old states are called.
        new: What the new states are called.
    """
    from jobs.table.view import key_as_text

    stages = comparison.stages.items()
    table(
        ((name, one.same, one.rounded, one.changed, one.only_old, one.only_new) for name, one in stages),
        ["stage", "same", "rounded", "changed", f"only {old}", f"only {new}"],
        left=["stage"],
    )
    fields = [
        (name, field or "(state)", one.changed, *((one.total, one.largest) if one.numbers else (None, None)))
        for name, found in stages
        for field, one in found.fields.items()
        if one.changed
    ]
    if fields:
        headings = ["stage", "field", "changed", f"sum of {new} - {old}", "largest"]
        table(fields, headings, left=["stage", "field"])
    sample = [(name, key_as_text(one.key), one.old, one.new) for name, found in stages for one in found.sample]
    if sample:
        table(sample, ["stage", "key", old, new], left=["stage", "key", old, new])

"""Shows what `headwater replay` finds and does, as text or as one line of JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jobs.cli.comparing import show_differences
from jobs.screen import counted, emit, say, table

if TYPE_CHECKING:
    from jobs.replay import Differences, Replayed, ReplayPlan, Swapped
    from jobs.replaying.planning import RebuildRange
    from persistence.pointer import Change, Pointer


def show_plan(plan: "ReplayPlan", *, json: bool) -> None:
    """Show what a rebuild would read, and how its states differ so far."""
    if json:
        emit(plan.as_json())
        return
    table(
        ((one.topic, one.partition, one.start, one.end, one.records, _deleted(one)) for one in plan.ranges),
        ["topic", "partition", "from", "to", "offsets", "deleted"],
        left=["topic"],
    )
    table(plan.keys.items(), ["stage", f"states of generation {plan.live}"], left=["stage"])
    for name in plan.redefined:
        say(f"stage {name} has another definition than in generation {plan.live}")
    if plan.seconds is not None and plan.rate is not None:
        say(
            f"at least {_duration(plan.seconds)}: to read {counted(plan.records, 'offset')} as fast as "
            f"{counted(plan.rate.records, 'record')} were read just now, in {plan.rate.seconds:.1f} s, without folding them"
        )
    _show_changes(plan.pointer.changes)
    if plan.differences is not None:
        say(f"differences as of now: generation {plan.generation} is {counted(plan.records, 'offset')} behind")
        _show_differences(plan.differences)
    if plan.pointer.rebuild is not None and plan.pointer.rebuild.worker:
        say(f"a process may be at work on the rebuild: {plan.pointer.rebuild.process}")
    if archived := sum(one.archived for one in plan.ranges):
        say(f"{counted(archived, 'record')} of these are read from the archive")
    if plan.snapshot is not None:
        say(f"the rebuild begins with the snapshot {plan.snapshot}")
    for one in plan.refused:
        say(f"--apply would be refused: {one.what}. {one.remedy} (--accept {one.risk})")
    continued = "continues the rebuild of" if plan.begun else "rebuilds"
    say(f"generation {plan.live} is live; --apply {continued} generation {plan.generation}")


def _deleted(one: "RebuildRange") -> str:
    """Number of offsets that Kafka has deleted, and which."""
    return f"{one.deleted} ({one.start} to {one.first - 1})" if one.deleted else "0"


def show_rebuilt(done: "Replayed", *, json: bool) -> None:
    """Show what was rebuilt."""
    if json:
        emit(done.as_json())
        return
    say(f"{counted(done.report.records, 'record')} in {counted(done.report.batches, 'batch', 'batches')}")
    if letters := done.report.reasons.total():
        say(f"{counted(letters, 'dead letter')} held until the swap")
    say(
        f"generation {done.generation} is rebuilt; generation {done.live} is live, and "
        + (f"{counted(done.behind, 'offset')} ahead" if done.behind else "not ahead")
    )


def shown(differences: "Differences", *, json: bool) -> bool:
    """Show the differences before a swap, which goes on."""
    if not json:
        _show_differences(differences)
    return True


def show_swapped(done: "Swapped", *, json: bool) -> None:
    """Show what was swapped and sent."""
    if json:
        emit(done.as_json())
        return
    say(
        f"{counted(done.dead_letters, 'dead letter')}, {counted(done.outputs, 'held output')} and "
        f"{counted(done.states, 'published state')} sent"
    )
    if done.dropped:
        say(f"{counted(done.dropped, 'dead letter')} dropped: their records will not be folded")
    say(f"generation {done.live} is live; start the flow again. --rollback returns to generation {done.previous}")


def show_pointer(pointer: "Pointer", *, json: bool) -> None:
    """Show the last change of the pointer, and the live generation."""
    if json:
        from msgspec import to_builtins

        emit(to_builtins(pointer))
        return
    _show_changes(pointer.changes[-1:])
    say(f"generation {pointer.live} is live")


def _show_differences(differences: "Differences") -> None:
    show_differences(differences.comparison, "old", "new")
    if differences.uncompared:
        say(
            f"not compared, because the definition has changed: {', '.join(differences.uncompared)}. --against MODULE:FLOW "
            "names the flow with the old definition"
        )


def _show_changes(changes: "Sequence[Change]") -> None:
    for one in changes:
        say(str(one))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )

"""The demo's final report: for a person, or as one JSON object."""

from collections import Counter
from typing import Any, Final

from envelope import Verdict
from jobs.demo.play import Result
from jobs.screen import table, write

DROPPED: Final = (Verdict.DUPLICATE, Verdict.DUPLICATE_IN_BATCH, Verdict.BELOW_FLOOR, Verdict.AMBIGUOUS)
_SHOWN: Final = ("legs", "air_minutes", "arr_delay", "worst_delay", "cancelled")
_MISMATCHES: Final = 10


def as_json(result: Result) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "flights": result.flights,
        "nonsense": result.nonsense,
        "messages": result.messages,
        "resent": result.resent,
        "crashes": len(result.crashes),
        "crashed_at": result.crashes,
        "keys": result.keys,
        "verdicts": {stage: dict(counts) for stage, counts in result.verdicts.items()},
        "dropped": dict(_dropped(result)),
        "dead_letters": dict(result.dead_letters),
        "mismatches": len(result.mismatches),
        "differing": result.mismatches[:_MISMATCHES],
        "exact": result.exact,
        "phases": result.phases,
        "seconds": round(result.seconds, 3),
    }


def show(result: Result) -> None:
    """Write the result for a person."""
    write(f"\nInjected among {result.flights:,} flights:")
    write(f"  {len(result.crashes)} processes killed (SIGKILL): {', '.join(result.crashes)}")
    write(f"  {result.resent:,} of {result.messages:,} messages sent again by the republisher after its crash")
    write(f"  {result.nonsense} malformed records, and the flights without a tail number")
    write("\nDropped, and why (copies from the republisher, and the job's own replays after its crashes):")
    dropped = [
        (stage, verdict.value, counts[verdict.value])
        for stage, counts in sorted(result.verdicts.items(), key=lambda found: list(result.keys).index(found[0]))
        for verdict in DROPPED
        if counts[verdict.value]
    ]
    table(
        [*dropped, *(("to the dead-letter topic", *one) for one in sorted(result.dead_letters.items()))],
        ["stage", "reason", "messages"],
        left=["stage", "reason"],
    )
    write("\nCarriers, compared with a consumer that adds up every message (naive):")
    table(
        (_carrier(result, carrier) for carrier in sorted(result.carriers)),
        ["carrier", "legs", "naive", "minutes in the air", "naive", "delay", "naive", "worst", "cancelled", "naive"],
        left=["carrier"],
    )
    checked = ", ".join(f"{count:,} {stage}" for stage, count in result.keys.items())
    write(f"\nCompared with the table of flights: {checked} states, {sum(result.dead_letters.values()):,} dead letters")
    for line in result.mismatches[:_MISMATCHES]:
        write(f"  {line}")
    if len(result.mismatches) > _MISMATCHES:
        write(f"  ... {len(result.mismatches)} in all")
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result.phases.items())
    write(f"{phases}; {result.seconds:.0f} s in all")
    write(f"exact: {'yes' if result.exact else 'no'}")


def _carrier(result: Result, carrier: str) -> list[Any]:
    mine, naive = result.carriers[carrier], result.naive.get(carrier, {})
    cells: list[Any] = [carrier]
    for name in _SHOWN:
        # A repeated message does not change the worst delay.
        cells += [mine[name]] if name == "worst_delay" else [mine[name], naive.get(name)]
    return cells


def _dropped(result: Result) -> Counter[str]:
    total: Counter[str] = Counter()
    for counts in result.verdicts.values():
        total.update({verdict.value: counts[verdict.value] for verdict in DROPPED if counts[verdict.value]})
    return total

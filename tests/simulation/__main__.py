"""`python -m tests.simulation`: one seed, one schedule, or the whole proof."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.simulation.faults import End
from tests.simulation.planted import BUGS, planted
from tests.simulation.prove import prove
from tests.simulation.schedules import attempt
from tests.simulation.shrink import outcome, shrink
from tests.simulation.steps import draw_world


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulation given by the arguments.

    Returns:
        0 if everything holds, 1 if something does not, 2 for invalid arguments.
    """
    options = _parser().parse_args(arguments)
    if options.command == "prove":
        return _prove(options)
    if options.plant:
        with planted(options.plant):
            return _one(options)
    return _one(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one seed, and shrink it if it fails")
    parser.add_argument("--steps", help="numbers of the seed's steps to take, as printed after shrinking")
    parser.add_argument("--world", type=int, help="run one schedule of faults in a small world")
    parser.add_argument("--faults", default="", help="its faults: NUMBER.END,NUMBER.END")
    parser.add_argument("--plant", choices=sorted(BUGS), help="with this bug planted")
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("prove", help="many seeds, every schedule, every planted bug")
    command.add_argument("--seeds", type=int, default=1_000_000)
    command.add_argument("--schedules", type=int, default=1_000_000)
    command.add_argument("--bugs", help="names of the planted bugs to search for; all by default")
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("--state", type=Path, default=Path(".headwater/prove.json"), help="file of the progress")
    command.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser


def _one(options: argparse.Namespace) -> int:
    if options.world is not None:
        ends = {int(place): End(end) for place, _, end in (one.partition(".") for one in _split(options.faults))}
        text = attempt(options.world, ends)
        print(text or "holds")
        return bool(text)
    if options.seed is None:
        print("give --seed N, --world N --faults ..., or prove; see --help", file=sys.stderr)
        return 2
    spec, steps = draw_world(options.seed)
    chosen = [int(number) for number in _split(options.steps)] if options.steps else list(range(len(steps)))
    text = outcome(options.seed, chosen)
    if not text:
        print(f"seed {options.seed} holds")
        return 0
    if not options.steps:
        kept = shrink(len(steps), lambda some: bool(outcome(options.seed, some)))
        chosen, text = kept, outcome(options.seed, kept)
    print(spec)
    for number in chosen:
        print(f"{number:4} {steps[number]}")
    print(text)
    print(f"repeat: python -m tests.simulation --seed {options.seed} --steps {','.join(map(str, chosen))}")
    return 1


def _split(text: str) -> list[str]:
    return [one for one in text.split(",") if one]


def _prove(options: argparse.Namespace) -> int:
    bugs = list(BUGS) if options.bugs is None else _split(options.bugs)
    proof = prove(options.seeds, options.schedules, bugs=bugs, state=options.state, workers=options.workers)
    for violation in proof.violations:
        print(f"python -m tests.simulation {violation}")
    missed = sorted(set(bugs) - set(proof.found))
    if missed:
        print(f"planted and not found: {', '.join(missed)}")
    if options.json:
        print(json.dumps(proof.summary()))
    else:
        print(", ".join(f"{name} {count}" for name, count in proof.summary().items()))
    return 0 if proof.holds else 1


if __name__ == "__main__":
    sys.exit(main())

"""Checks the models of the rules, `docs/models/*.tla`, and that their broken variants fail.

    python -m tests.models [--checker tla] [MODEL ...]

The `.cfg` of a model lists what is checked: constants and invariants, and in comments other values for which
it must hold, and variants that must fail, each with the violated invariant (`Above`: the refinement).

    \\* holds: After = 3
    \\* fails: Broken = "no_run_id" -> LossNoticed

The exit code is 1 if a search ends differently.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

MODELS = Path(__file__).parents[2] / "docs" / "models"
REFINED = "Above"
"""Instance of the abstract model in a model that is checked by refinement."""
STATES = 5_000_000
"""Far above the size of any model here: a search that reaches it is incomplete, and counts as failed."""


class Case(NamedTuple):
    """One search of a model: constants, and the expected end."""

    constants: tuple[str, ...]
    expected: str


class Outcome(NamedTuple):
    """How a search ended: `ok`, the violated invariant, `Above`, or the checker's message; states and seconds."""

    end: str
    states: int
    seconds: float


def cases(config: str) -> list[Case]:
    """Return the searches of a `.cfg`: its own values first, then those of its comments."""
    found = [Case((), "ok")]
    for kind, constants, end in re.findall(r"^\\\* (holds|fails): (.*?)(?: -> (\w+))?$", config, re.MULTILINE):
        if bool(end) != (kind == "fails"):
            raise SystemExit(f"a line '{kind}: {constants}' {'needs' if kind == 'fails' else 'has no'} '-> Invariant'")
        found.append(Case(tuple(one.replace(" = ", "=") for one in constants.split("; ")), end or "ok"))
    return found


def search(checker: str, model: Path, constants: tuple[str, ...]) -> Outcome:
    """Run the checker over every state of a model."""
    command = [checker, model.name, "--config", f"{model.stem}.cfg", "--allow-deadlock", "--json"]
    command += ["--max-states", str(STATES)]
    command += [word for one in constants for word in ("-c", one)]
    if f"{REFINED} ==" in model.read_text():
        command += ["--check-refinement", REFINED]
    done = subprocess.run(command, cwd=model.parent, capture_output=True, text=True, check=False)
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        return Outcome(f"no answer: {(done.stderr or done.stdout).strip()}", 0, 0.0)
    answer = json.loads(answers[-1])
    end = {"invariant_violation": answer.get("invariant_name"), "refinement_violation": answer.get("alias")}
    stats = answer.get("stats", {})
    return Outcome(
        end.get(answer["status"]) or answer["status"], stats.get("states_explored", 0), stats.get("elapsed_secs", 0.0)
    )


def main() -> int:
    """Check the named models, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of models, such as Growth; default: all")
    parser.add_argument("--checker", default="tla", help="the binary of tla-checker; default: tla, on the path")
    args = parser.parse_args()
    found = shutil.which(args.checker)
    if found is None:
        parser.error(f"{args.checker} was not found: make model builds it")
    checker = str(Path(found).resolve())
    wrong = 0
    for model in [MODELS / f"{name}.tla" for name in args.models] or sorted(MODELS.glob("*.tla")):
        config = model.with_suffix(".cfg")
        if not config.exists():
            continue  # an abstract model is checked through the models that refine it
        for case in cases(config.read_text()):
            outcome = search(checker, model, case.constants)
            wrong += outcome.end != case.expected
            verdict = "as it must" if outcome.end == case.expected else f"WRONG: expected {case.expected}"
            name = " ".join((model.stem, *case.constants))
            sys.stdout.write(f"{name}: {outcome.end}, {outcome.states} states, {outcome.seconds:.1f} s: {verdict}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{wrong} wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

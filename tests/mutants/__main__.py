"""`make mutants`: mutmut over the core, its modules named in pyproject.toml, and a report of what survived.

It can be stopped at any time, and resumes. A mutant is tried again if its function has changed, or if
it survived without a known reason. Names or patterns restrict it: `make mutants ARGS='envelope.dedup.history.*'`.
"""

import ast
import copy
import json
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import takewhile
from pathlib import Path

from tests.mutants.quick import OUT_OF_TIME

ROOT = Path("mutants")
KNOWN = Path(__file__).with_name("survivors.txt")
WANTED = 0.95
_CONTEXT = 24
_SQL = ("BEGIN", "COMMIT", "ROLLBACK", "PRAGMA", "SELECT", "INSERT", "UPDATE")
_FEW = "persistence.findings.*"
_SKIPPED = 34
_OUT_OF_TIME = (OUT_OF_TIME, -24, 36, 152)
_DEAD = (*_OUT_OF_TIME, 1, 3, 255)  # 255: a test file that uses it while it is imported could not be imported


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        name: mutmut's name for it; numbers change with the function.
        module: Its module.
        code: mutmut's code for the result; None if it was not tried yet.
        change: If it survives, function and change; stable as long as that code is the same.
        text: Only the words of a sentence differ.
    """

    name: str
    module: str
    code: int | None
    change: str = ""
    text: bool = False


def mutants() -> Iterator[Mutant]:
    """All mutants."""
    for meta in sorted(ROOT.rglob("*.py.meta")):
        source = ast.parse(meta.with_suffix("").read_text())
        functions = {node.name: node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            module, _, mangled = name.rpartition(".")
            if code in (None, _SKIPPED, *_DEAD):
                yield Mutant(name, module, code)
                continue
            start = mangled.partition("__mutmut_")[0]
            function = start.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
            before, after = _body(functions[f"{start}__mutmut_orig"]), _body(functions[mangled])
            change = f"{module}.{function}: {difference(ast.unparse(before), ast.unparse(after))}"
            yield Mutant(name, module, code, change, _wordless(before) == _wordless(after))


def _body(function: ast.FunctionDef) -> ast.Module:
    return ast.Module(function.body[ast.get_docstring(function) is not None :], [])


def difference(before: str, after: str) -> str:
    """`old => new`, each with some context."""
    old, new = " ".join(before.split()), " ".join(after.split())
    start = _alike(old, new)
    end = min(_alike(old[::-1], new[::-1]), min(len(old), len(new)) - start)
    return " => ".join(one[max(start - _CONTEXT, 0) : len(one) - end + _CONTEXT].strip() for one in (old, new))


def _alike(one: str, other: str) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _wordless(body: ast.Module) -> str:
    return ast.dump(_Wordless().visit(copy.deepcopy(body)))


class _Wordless(ast.NodeTransformer):
    """Empties every string that is a sentence, and converts SQL to capitals, since SQL ignores case."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        words = node.value.split() if isinstance(node.value, str) else []
        if words and words[0].upper() in _SQL:
            return ast.Constant(node.value.upper())
        return ast.Constant("") if len(words) > 1 else node


def known() -> set[str]:
    """The changes with a reason in `survivors.txt`."""
    lines = (line.strip() for line in KNOWN.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def choose(patterns: list[str], listed: set[str], *, out_of_time: bool) -> None:
    """Have mutants tried that were not tried yet, or survive without a reason, and match a pattern, if any.

    Args:
        patterns: The patterns.
        listed: Changes with a reason.
        out_of_time: Also try mutants with which the tests did not end.
    """
    again = {
        one.name
        for one in mutants()
        if _kind(one, listed) in ("unknown", "untried") or (out_of_time and one.code in _OUT_OF_TIME)
    }
    for meta in ROOT.rglob("*.py.meta"):
        notes = json.loads(meta.read_text())
        codes = notes["exit_code_by_key"]
        for name in again & codes.keys():
            wanted = not patterns or any(fnmatch(name, pattern) for pattern in patterns)
            codes[name] = None if wanted else _SKIPPED
        meta.write_text(json.dumps(notes))


def report(listed: set[str]) -> bool:
    """Print a line per module and every survivor without a reason; return whether the result is acceptable."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    unknown, left = [], set(listed)
    for one in mutants():
        left.discard(one.change)
        kind = _kind(one, listed)
        rows[one.module][kind] += 1
        if kind == "unknown":
            unknown.append(one)
    total: Counter[str] = sum(rows.values(), Counter())
    kinds = ("mutants", "killed", "text", "listed", "unknown", "untried")
    print(f"{'':34}", *(f"{kind:>9}" for kind in kinds))
    for module, row in [*sorted(rows.items()), ("", total)]:
        print(f"{module:34}", *(f"{row[kind] if kind != 'mutants' else row.total():9}" for kind in kinds))
    tried = total.total() - total["untried"]
    ratio = total["killed"] / max(tried, 1)
    print(f"{total['killed']} of {tried} tried mutants are killed: {ratio:.1%}")
    for one in unknown:
        print(f"{one.change}\n    {one.name}")
    if total["untried"]:
        return False
    for change in sorted(left):
        print(f"listed, and no survivor: {change}")
    return not unknown and not left and ratio >= WANTED


def _kind(one: Mutant, listed: set[str]) -> str:
    if one.code in (None, _SKIPPED):
        return "untried"
    if one.code in _DEAD:
        return "killed"
    return "text" if one.text else "listed" if one.change in listed else "unknown"


def _mutmut(*patterns: str) -> None:
    """Have mutmut try what has no result and, even if it has one, what matches a pattern."""
    mutmut = Path(sys.executable).with_name("mutmut")
    subprocess.run([str(mutmut), "run", "--max-children", "1", *patterns], check=True)


def _quickly() -> None:
    """Try what has no result with most of the tests; see `tests.mutants.quick`."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    tests = (*settings["pytest_add_cli_args_test_selection"], *settings["pytest_add_cli_args"])
    command = [sys.executable, "-m", "pytest", "-ptests.mutants.quick", "--rootdir=.", "-q", *tests]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def main(arguments: list[str]) -> int:
    """Run and report; return 0 if enough mutants are killed and every survivor has a reason."""
    listed = known()
    if arguments != ["report"]:
        (ROOT / "mutmut-stats.json").unlink(missing_ok=True)  # which test reaches what may have changed
        _mutmut(_FEW)  # makes all mutants, and notes which test reaches what
        choose(arguments, listed, out_of_time=True)
        _quickly()
        choose(arguments, listed, out_of_time=False)
        _mutmut()
    return 0 if report(listed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

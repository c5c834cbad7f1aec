"""A pytest plugin that tries the mutants without a result, each in a process forked from one that has collected the tests.

It runs in mutmut's copy of the code, after mutmut has noted which tests reach which function. The tests that reach a
mutant run until one fails: first those that failed for other mutants of the function, then the fastest. Modules that
start threads when they are imported are collected in the forked process, which does not have the threads of the other.
Modules are imported without a mutant. Therefore mutmut tries each mutant again that survives here.
"""

import json
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
from mutmut.mutation import trampoline

# Exit codes, as mutmut writes them.
OUT_OF_TIME: Final = 24
KILLED: Final = 1
_BROKEN: Final = 3  # pytest itself failed
_LIMITS: Final = ((signal.ITIMER_PROF, 10.0, 5.0), (signal.ITIMER_REAL, 20.0, 30.0))
"""Of CPU time and of time, because other processes may delay a test: times what it usually takes, and seconds more."""
_POOL: Final = "polars-0"  # a thread of polars
_START_THREADS: Final = frozenset(
    f"test_{name}.py"
    for name in (
        *("dead_letter_doubt", "dead_letter_routes", "discard", "flow", "memory_runner", "message_loop", "raised"),
        *("redrive", "snapshots", "submit", "went_back"),
    )
)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out modules that start threads, until a module is named."""
    return True if collection_path.name in _START_THREADS else None


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """End the run if another module starts threads: tests would wait for them in a forked process."""
    mutant = trampoline.get_mutant_under_test()
    if not mutant and any(thread.read_text().strip() == _POOL for thread in Path("/proc/self/task").glob("*/comm")):
        pytest.exit(f"{report.nodeid} starts threads: exclude it in {Path(__file__).name}", returncode=2)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Try the mutants, those with the fastest tests first, and print the exit code of each."""
    stats = json.loads(Path("mutmut-stats.json").read_text())
    usual: dict[str, float] = stats["duration_by_test"]
    reaching: dict[str, list[str]] = stats["tests_by_mangled_function_name"]
    tests = sorted((item for item in session.items if item.nodeid in usual), key=lambda item: usual[item.nodeid])
    trial = _Trial(session, usual)
    if trial.run("", tests)[0] or trial.run("fail", tests)[0] != KILLED:
        pytest.exit("a test fails without a mutant, or none reaches the mutants", returncode=2)
    for _, function, meta, mutants in sorted(_untried(usual, reaching)):
        names = set(reaching.get(function, ()))
        reached = [item for item in tests if item.nodeid in names]
        for mutant in mutants:
            code, failed = trial.run(mutant, reached, names - {item.nodeid for item in reached})
            reached.sort(key=lambda item: item.nodeid != failed)
            notes = json.loads(meta.read_text())
            notes["exit_code_by_key"][mutant] = code
            meta.write_text(json.dumps(notes))
            print(code, mutant, file=sys.stderr, flush=True)
    return True


def _untried(
    usual: Mapping[str, float], reaching: Mapping[str, Sequence[str]]
) -> list[tuple[float, str, Path, list[str]]]:
    """(seconds of its tests, function, file with its results, mutants without a result)."""
    found: dict[tuple[float, str, Path], list[str]] = {}
    for meta in Path().rglob("*.py.meta"):
        for mutant, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            if code is None:
                function = mutant.partition("__mutmut_")[0]
                cost = sum(usual[test] for test in reaching.get(function, ()))
                found.setdefault((cost, function, meta), []).append(mutant)
    return [(*where, mutants) for where, mutants in found.items()]


class _Trial:
    """Runs tests with a mutant.

    Args:
        session: The session that has collected the tests.
        usual: Seconds that each test takes if nothing is changed.
    """

    def __init__(self, session: pytest.Session, usual: Mapping[str, float]) -> None:
        self._session = session
        self._usual = usual

    def run(self, mutant: str, tests: Sequence[pytest.Item], late: Collection[str] = ()) -> tuple[int, str]:
        """Run tests in a process.

        Args:
            mutant: Name of the mutant.
            tests: The tests.
            late: Names of tests to collect there.

        Returns:
            The exit code, and the name of the test that failed.
        """
        reading, writing = os.pipe()
        with TemporaryDirectory() as place:
            if not (child := os.fork()):
                code = _BROKEN
                try:
                    os.environ["PYTEST_DEBUG_TEMPROOT"] = place
                    trampoline.set_mutant_under_test(mutant)
                    trampoline.get_mutant_under_test = lambda: mutant  # called in each call of a function with mutants
                    code = self._run(tests, writing) or self._run(self._collected(late), writing)
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as failed:
            code = os.waitstatus_to_exitcode(status)
            return OUT_OF_TIME if code in (-signal.SIGPROF, -signal.SIGALRM) else code, failed.read()

    def _collected(self, names: Collection[str]) -> list[pytest.Item]:
        modules = sorted({name.partition("::")[0] for name in names})
        items = self._session.perform_collect(modules) if modules else []
        return [item for item in items if item.nodeid in names]

    def _run(self, tests: Sequence[pytest.Item], writing: int) -> int:
        for item, following in zip_longest(tests, tests[1:]):
            for timer, times, seconds in _LIMITS:
                signal.setitimer(timer, times * self._usual[item.nodeid] + seconds)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._session.testsfailed:
                os.write(writing, item.nodeid.encode())
                return KILLED
        return 0

"""A pytest plugin for `make mutants`: it runs the fastest tests first and ends the run in a test that does not end."""

import json
import os
import signal
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from mutmut.mutation import trampoline

OUT_OF_TIME = 24
"""Exit code that mutmut takes for a run that did not end."""
_USUAL = 10.0  # times the seconds that a test takes if nothing is changed
_SECONDS = 5.0  # beyond that


@cache
def usual() -> Mapping[str, float]:
    """Seconds that each test took if nothing was changed; empty while mutmut measures that, in the working directory."""
    stats = Path("mutmut-stats.json")
    measured: dict[str, float] = json.loads(stats.read_text())["duration_by_test"] if stats.exists() else {}
    return measured


def pytest_configure() -> None:
    """Read the name of the mutant once, and not in every call of a function that has mutants."""
    mutant = trampoline.get_mutant_under_test()
    trampoline.get_mutant_under_test = lambda: mutant


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the fastest tests first: most mutants fail in one of them."""
    items.sort(key=lambda item: usual().get(item.nodeid, 0.0))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End the run if a test takes far longer than usual: in CPU time, since other processes may delay it."""
    if item.nodeid not in usual():
        return (yield)
    signal.signal(signal.SIGPROF, lambda *_: os._exit(OUT_OF_TIME))
    signal.setitimer(signal.ITIMER_PROF, _USUAL * usual()[item.nodeid] + _SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)

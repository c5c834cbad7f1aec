"""Names of modules: one that the standard library has too would be imported in its place.

A program has its own directory in front of everything on the path, so a file beside ours (or one of ours that is
given to spark-submit) finds them where the standard library looks for its own.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("envelope", "persistence", "aggregations", "jobs", "examples")


def modules(top: str) -> Iterator[tuple[str, Path]]:
    """Name of every module and package below a directory, with its path."""
    for path in (ROOT / top).rglob("*.py"):
        yield (path.parent.name if path.name == "__init__.py" else path.stem), path.relative_to(ROOT)


@pytest.mark.parametrize("top", PACKAGES)
def test_no_module_has_a_name_of_the_standard_library(top: str) -> None:
    found = list(modules(top))
    assert found
    assert [str(path) for name, path in found if name in sys.stdlib_module_names] == []

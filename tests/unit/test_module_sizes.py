"""A module is one idea. One that has grown over the limit usually has two."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("envelope", "persistence", "aggregations", "jobs", "tests", "benchmarks", "docs", "examples")
MOST_LINES = 600


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_has_too_many_lines(folder: str) -> None:
    modules = [path for path in (ROOT / folder).rglob("*.py") if not path.name.endswith("_pb2.py")]
    assert modules
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules}
    long = {path: count for path, count in lines.items() if count > MOST_LINES}
    assert not long, f"modules with more than {MOST_LINES} lines, to be split by idea: {long}"

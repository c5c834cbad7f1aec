"""The packages whose names are public, and the Python that the documents show."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FACES = (
    "aggregations",
    "envelope",
    "envelope.filters",
    "jobs",
    "jobs.copying",
    "jobs.republish",
    "persistence",
    "persistence.contract",
    "persistence.kafka",
)
"""What each of them names in `__all__` is public, and nothing else."""

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def documents() -> Iterator[tuple[str, list[ast.Module]]]:
    """Path and Python blocks of each page; `tests/docs/test_readme.py` runs them."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        blocks = [ast.parse(block) for block in _BLOCK.findall(path.read_text())]
        yield str(path.relative_to(ROOT)), blocks


def programs() -> Iterator[tuple[str, list[ast.Module]]]:
    """The same for the examples, and for the template of `headwater new`, which other tests run."""
    for folder in ("examples", "jobs/new/template"):
        for path in sorted((ROOT / folder).glob("*.py")):
            yield str(path.relative_to(ROOT)), [ast.parse(path.read_text())]


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What it imports from headwater: module, and name; an empty name for a whole module."""
    for node in ast.walk(tree):
        names = [(one.name, "") for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [(node.module, one.name) for one in node.names]
        for module, name in names:
            if (ROOT / module.split(".")[0] / "__init__.py").exists():
                yield module, name

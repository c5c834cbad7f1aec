"""Compiled code that is kept on disk: it must not outlive the source code that it was made from."""

import ast
import importlib
from pathlib import Path

import pytest

import aggregations
import persistence
from persistence import compiled

PACKAGES = [Path(package.__path__[0]) for package in (aggregations, persistence)]
MODULES = [
    importlib.import_module(".".join(file.relative_to(package.parent).with_suffix("").parts))
    for package in PACKAGES
    for file in sorted(package.rglob("*.py"))
    if "\n@compiled" in file.read_text()
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_name_of_compiled_code_in_the_cache_depends_on_all_source_code_that_it_may_contain(module) -> None:
    found = [
        one for one in vars(module).values() if hasattr(one, "py_func") and one.py_func.__module__ == module.__name__
    ]
    cached = [one for one in found if one.targetoptions.get("forceinline") is None]
    assert cached
    assert all(one.py_func.__qualname__.endswith(f"_{compiled.version()}") for one in cached)
    assert module.__file__ is not None
    imported = {
        node.module
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and node.module.split(".")[0] in ("aggregations", "envelope", "persistence")
    }
    for name in imported - {
        "aggregations.definition.aggregates",
        "aggregations.definition.fields",
        "aggregations.definition.values",
    }:
        assert name in compiled.SOURCES or name.rpartition(".")[0] in compiled.SOURCES, name


def test_the_version_follows_any_change_of_the_source_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text("NUMBER = 1")
    (tmp_path / "note.txt").write_text("")
    monkeypatch.setattr(compiled, "_files", lambda name: sorted(tmp_path.glob("*.py")))
    before = compiled.version.__wrapped__()
    (tmp_path / "note.txt").write_text("more")
    assert compiled.version.__wrapped__() == before
    (tmp_path / "one.py").write_text("NUMBER = 2")
    assert compiled.version.__wrapped__() != before

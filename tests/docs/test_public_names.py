"""Each public name can be imported from its face, says what it is, and is shown in an example that a test runs."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from typing import Any

import pytest
from typer.main import get_command

from jobs.cli import app
from tests.support.faces import FACES, ROOT, documents, imported, programs


def public(face: str) -> dict[str, Any]:
    """The public names of a package, with what they stand for."""
    module = importlib.import_module(face)
    return {name: getattr(module, name) for name in module.__all__}


def shown() -> Iterator[tuple[str, str]]:
    """Face and name of everything that a document imports and uses."""
    for _, blocks in documents():
        used = {node.id for block in blocks for node in ast.walk(block) if isinstance(node, ast.Name)}
        for block in blocks:
            yield from ((module, name) for module, name in imported(block) if name in used)


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_is_in_an_example(face: str) -> None:
    missing = sorted(public(face).keys() - {name for module, name in shown() if module == face})
    assert not missing, f"{face}: show these in a Python block of docs/, or take them out of `__all__`: {missing}"


@pytest.mark.parametrize("face", FACES)
def test_every_public_class_and_function_has_a_docstring_of_its_own(face: str) -> None:
    documented = {name: one for name, one in public(face).items() if inspect.isclass(one) or inspect.isfunction(one)}
    assert documented
    wrong = [name for name, one in documented.items() if not sentence(name, vars(one).get("__doc__") or one.__doc__)]
    assert not wrong, f"{face}: say in the docstring what these are: {wrong}"


def test_importing_a_face_imports_only_what_is_used() -> None:
    program = "import sys, aggregations, jobs, persistence; print({'polars', 'msgspec', 'pyspark'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def sentence(name: str, text: str | None) -> bool:
    """Whether a docstring was written by somebody: that of a dataclass without one is its signature."""
    first = (text or "").partition("\n\n")[0]
    return first.endswith(".") and not first.startswith(f"{name}(")


def test_documents_examples_and_template_import_from_faces_only() -> None:
    others = {
        f"{place}: {module}{'.' * bool(name)}{name}"
        for place, trees in (*documents(), *programs())
        for tree in trees
        for module, name in imported(tree)
        if not (module in FACES and name in public(module)) and module.split(".")[:2] != ["jobs", "demo"]
    }
    assert not others, f"not public: {sorted(others)}"


def test_every_command_is_in_the_table_of_functions_and_each_function_is_public() -> None:
    page = (ROOT / "docs" / "api" / "index.md").read_text().partition("## Commands and their functions")[2]
    rows = dict(re.findall(r"^\| `([a-z -]+)` \| (.+) \|$", page, re.MULTILINE))
    [alone] = re.findall(r"^(`new`.*?)are commands\s+only", page, re.MULTILINE | re.DOTALL)
    commands = {path.removeprefix("headwater ") for path, _ in leaves("headwater", get_command(app))}
    assert {*rows, *re.findall(r"`([a-z -]+)`", alone)} == commands
    for name in re.findall(r"`([\w.]+)`", " ".join(rows.values())):
        face = max((face for face in FACES if name.startswith(f"{face}.")), key=len)
        first, *attributes = name.removeprefix(f"{face}.").split(".")
        assert callable(reduce(getattr, attributes, public(face)[first])), name


def leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands, with their words."""
    if not hasattr(command, "commands"):
        yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(f"{path} {name}", inner)

"""What the documents show works: their Python runs, their commands exist."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser
from typer.main import get_command

from jobs.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMMAND = re.compile(r"^\s*(?:\$ )?headwater (.+?)(?:\s+#.*)?$", re.MULTILINE)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shell_blocks(text: str) -> Iterator[str]:
    """Code blocks that are no Python."""
    language, lines = None, []
    for line in text.splitlines():
        if not line.startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines = line.removeprefix("```"), []
        else:
            if language in ("", "console"):
                yield "\n".join(lines)
            language = None


def commands() -> list[tuple[str, str]]:
    """Every `headwater ...` line of a code block."""
    return [
        (name(path), line)
        for path in DOCUMENTS
        for block in shell_blocks(path.read_text())
        for line in COMMAND.findall(block.replace("\\\n", " "))
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_the_python_in_it_runs(path: Path) -> None:
    document = Document.parse(str(path), PythonCodeBlockParser(), encoding="utf-8")
    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_the_python_in_functions_that_nothing_calls_uses_names_that_exist(path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=concise", "-"]
    found = subprocess.run(command, input="\n".join(blocks), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(("document", "line"), commands())
def test_its_commands_exist_with_these_options(document: str, line: str) -> None:
    command: Any = get_command(app)
    arguments = shlex.split(line)
    path = "headwater"
    while hasattr(command, "commands"):
        path += f" {arguments[0]}"
        command = command.commands[arguments.pop(0)]
    command.make_context(path, arguments)


def named() -> list[tuple[str, str]]:
    """Every `headwater ...` between backticks in the documents and in the texts of the code."""
    code = [path for top in ("envelope", "persistence", "aggregations", "jobs") for path in (ROOT / top).rglob("*.py")]
    texts = [(name(path), re.sub(r'"\n\s*f?"', "", path.read_text())) for path in [*DOCUMENTS, *code]]
    return [(place, words) for place, text in texts for words in re.findall(r"(?<!`)`headwater ([^`]+)`(?!`)", text)]


@pytest.mark.parametrize(("place", "words"), named())
def test_a_command_that_a_text_names_exists_with_its_options(place: str, words: str) -> None:
    command: Any = get_command(app)
    left = [word for word in words.split() if word != "..." and not word.isupper()]
    while left and not left[0].startswith("-") and hasattr(command, "commands"):
        assert left[0] in command.commands, f"{place}: headwater {words}"
        command = command.commands[left.pop(0)]
    known = {option for one in command.params for option in one.opts} | {"--help"}
    assert {word for word in left if word.startswith("--")} <= known, f"{place}: headwater {words}"


def test_the_readme_shows_every_command_but_those_that_make_runs() -> None:
    shown = {line.split()[0] for document, line in commands() if document == "README.md"}
    every: Any = get_command(app)
    assert shown | {"demo"} >= set(every.commands)


def test_the_example_is_the_readme_s_flow() -> None:
    [flow] = re.findall(r"^flow = \(\n.*?^\)", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert flow in (ROOT / "examples" / "fleet.py").read_text()
    assert len([line for line in flow.splitlines() if line]) <= 15


@pytest.mark.parametrize("path", [ROOT / "CHANGELOG.md", *DOCUMENTS], ids=name)
def test_lines_fit_a_wide_terminal(path: Path) -> None:
    lines = enumerate(path.read_text().splitlines(), start=1)
    assert [number for number, line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_links_within_the_repository_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{name(path)}: {target}"

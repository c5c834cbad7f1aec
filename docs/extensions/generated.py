"""Parts of pages that are made from the code: `<!-- generated: NAME -->` in a page stands for such a part."""

import re
from typing import Any

from commands import commands

PARTS = {"commands": commands}
_MARKER = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)


def fill(application: Any, page: str, source: list[str]) -> None:
    """Put the generated parts into a page that is read."""
    source[0] = _MARKER.sub(lambda marker: PARTS[marker[1]](), source[0])


def drop_module_docstring(application: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Leave out what a package says of itself in Markdown: its page has an introduction of its own."""
    if what == "module":
        lines.clear()


def setup(application: Any) -> dict[str, bool]:
    application.connect("source-read", fill)
    application.connect("autodoc-process-docstring", drop_module_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""What the Python blocks of a guide define."""

import ast
import re
from typing import Any

from tests.support.faces import ROOT


def load(page: str, **names: str) -> dict[str, Any]:
    """Define what a guide defines, with other names for topics, copies and producers."""
    text = (ROOT / "docs" / "guides" / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    tree = ast.parse("\n".join(blocks))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names:
            node.value = names[node.value]
    found: dict[str, Any] = {}
    exec(compile(tree, page, "exec"), found)
    return found

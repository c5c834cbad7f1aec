"""What a bug is made of: something of the real code, and what stands in its place."""

from typing import Any

Patch = tuple[object, str, Any]
"""Owner, attribute, and what stands there while the bug is planted."""


def original(owner: object, attribute: str) -> Any:
    """The function that a patch replaces, as it was when this was imported."""
    found = vars(owner)[attribute]
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found

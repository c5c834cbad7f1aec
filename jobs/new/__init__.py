"""Creates a new project by copying the folder `template`."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from jobs.environment import UsageError

_RENAMED: Final = {"gitignore": ".gitignore"}
"""Renamed, because a `.gitignore` in the template would apply to this repository."""


def template() -> dict[str, Traversable]:
    """Return the files of a new project by name."""
    found = (file for file in (files("jobs.new") / "template").iterdir() if file.is_file())
    return {_RENAMED.get(file.name, file.name): file for file in sorted(found, key=lambda file: file.name)}


def create(directory: Path) -> list[str]:
    """Write a new project.

    Args:
        directory: Directory of the project; created, with its parents, if it does not exist.

    Returns:
        Names of the files.

    Raises:
        UsageError: The directory is not empty, or cannot be written.
    """
    found = template()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty: choose an empty or a new directory")
        for name, file in found.items():
            (directory / name).write_bytes(file.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error.strerror}; choose another directory") from error
    return [*found]

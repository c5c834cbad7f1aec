"""Where the documentation is on this machine."""

from pathlib import Path


def directory() -> Path:
    """Return the directory of the documentation's pages, which are in the wheel and in the source tree."""
    installed = Path(__file__).parent / "docs"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "docs"

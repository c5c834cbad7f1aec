"""Directories that several parts of headwater use."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The directory for caches: `HEADWATER_CACHE`, or else `headwater` in the user's cache directory."""
    if own := os.environ.get("HEADWATER_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "headwater"

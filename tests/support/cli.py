"""The command line in the tests' own process."""

import sys

import pytest

from jobs.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run a command and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["headwater", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)

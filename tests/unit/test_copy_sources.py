"""Sources of a copy that cannot be opened."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from jobs.copying import FileLines, QueryRows
from jobs.copying.source import SourceError, Task
from persistence.kafka import KafkaSettings

TASK = Task("shop", "sales", 1_000_000, None, 0, until_caught_up=True, settings=KafkaSettings("127.0.0.1:1"))


def refused() -> Any:
    raise sqlite3.OperationalError("no such host")


@pytest.mark.parametrize(
    ("connect", "why"), [("missing.db", "unable to open database file"), (refused, "no such host")]
)
def test_a_database_that_cannot_be_opened_is_named_with_the_remedy(
    connect: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=rf"the database cannot be opened: {why}\. Check its name"):
        QueryRows(connect, "SELECT 1 AS n", "n").open(TASK, None)


def test_a_file_that_does_not_exist_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "none.log"
    with pytest.raises(SourceError, match=rf"{path}: No such file or directory\. Correct its name"):
        FileLines(path).open(TASK, None)

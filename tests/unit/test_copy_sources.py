"""Sources of a copy: what cannot be opened is named, and a query runs on any driver."""

import json
import sqlite3
import sys
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from envelope import decode
from jobs.copying import FileLines, QueryRows
from jobs.copying.query import _json
from jobs.copying.source import SourceError, Task
from persistence.kafka import KafkaSettings
from tests.support.dbapi import STYLES, driver

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


@pytest.fixture
def sales(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE sales (number INTEGER, till TEXT)")
        rows = [(1, "a%"), (2, "a%"), (3, "b"), (4, "a%"), (7, "a%")]
        database.executemany("INSERT INTO sales VALUES (?, ?)", rows)
    return path


@pytest.mark.parametrize("given", [True, False], ids=["named by the user", "found at the driver"])
@pytest.mark.parametrize("style", STYLES)
def test_a_query_continues_after_its_position_on_a_driver_of_any_style(
    style: str, given: bool, sales: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, connect = driver(style, sales)
    if not given:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    query = "SELECT * FROM sales WHERE till LIKE 'a%' AND number % 5 <> 2"

    def rows(position: Any, most: int) -> tuple[list[int], Any]:
        source = QueryRows(connect, query, "number", key="till", paramstyle=style if given else None)
        source.open(TASK, position)
        with closing(source):
            read = source.read(most)
            return [json.loads(decode(one.value).payload)["number"] for one in read.outputs], source.position

    first, position = rows(None, 1)
    rest, position = rows(position, 10)
    assert (first, rest, position) == ([1], [4], {"column": "number", "after": 4, "rows": 2})
    with closing(sqlite3.connect(sales)) as database, database:
        database.execute("INSERT INTO sales VALUES (8, 'a%')")
    assert rows(position, 10)[0] == [8]


def test_a_style_that_python_does_not_know_is_refused_with_those_that_it_knows(sales: Path) -> None:
    _, connect = driver("dollar", sales)
    with pytest.raises(SourceError, match=r"unknown paramstyle dollar\. Give one of qmark, format"):
        QueryRows(connect, "SELECT * FROM sales", "number", paramstyle="dollar").open(TASK, None)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (
            "9e999",
            r"row 1 in the order of number: column x has a value of type float that JSON does not have\. Convert it",
        ),
        ("CAST(x'ff' AS TEXT)", r"the rows after number .* cannot be read: Could not decode to UTF-8 .*CAST"),
    ],
)
def test_a_row_that_cannot_be_written_is_named_with_the_remedy(value: str, why: str, sales: Path) -> None:
    """orjson#441: an infinity was copied as null. A text of other bytes ended with a stack trace."""
    query = f"SELECT number, CASE number WHEN 2 THEN {value} ELSE 1 END AS x FROM sales"
    source = QueryRows(str(sales), query, "number")
    source.open(TASK, None)
    with closing(source), pytest.raises(SourceError, match=why):
        source.read(10)


def test_a_decimal_of_a_driver_is_copied_and_an_unknown_type_is_named(sales: Path) -> None:
    class Odd:
        pass

    with pytest.raises(SourceError, match=r"row 0: column b has a value of type Odd that JSON does not have"):
        _json({"a": Decimal("1.10"), "b": Odd()}, "row 0")
    assert json.loads(_json({"a": Decimal("1.10"), "n": None}, "row 0")) == {"a": "1.10", "n": None}

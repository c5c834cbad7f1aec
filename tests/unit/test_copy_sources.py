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
from jobs.copying.source import Read, SourceError, Task
from jobs.republish.absence import Unsafe
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


def lines_of(read: Read) -> list[bytes]:
    return [decode(one.value).payload for one in read.outputs]


def opened(path: Path, position: Any = None) -> FileLines:
    source = FileLines(path)
    source.open(TASK, position)
    return source


OLD = b"".join(b"old line %04d\n" % n for n in range(10))
NEW = b"".join(b"new line of the day after %04d\n" % n for n in range(10))
BEATS = b"heartbeat ok\n"


@pytest.mark.parametrize("most", [3, 10**6], ids=["in the middle of the file", "at its end"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (OLD, NEW),
        (OLD, b"O" + OLD[1:] + NEW),
        (OLD + b"no end", NEW),
        (b"error 1\n" + BEATS * 50_000, b"error 2\n" + BEATS * 50_001),
    ],
    ids=["other lines", "one byte", "an unfinished line", "the same end"],
)
def test_a_log_that_was_truncated_and_is_longer_than_before_is_refused(
    old: bytes, new: bytes, most: int, tmp_path: Path
) -> None:
    log = tmp_path / "access.log"
    log.write_bytes(old)
    with closing(opened(log)) as source:
        source.read(most)
        source.check()
        with log.open("r+b") as file:
            file.truncate(0)
            file.write(new)
        with pytest.raises(Unsafe, match=f"{log} was truncated or replaced while it was read"):
            source.read(100)


@pytest.mark.parametrize("size", [10, 3 << 20], ids=["less than a read", "more than is compared"])
def test_a_log_that_is_truncated_between_a_read_and_its_commit_is_refused(size: int, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_bytes(OLD)
    source = opened(log)
    with closing(source):
        source.read(100)
        with log.open("ab") as file:
            file.write(NEW * (size // len(NEW) + 1))
        source.check()
        source.read(10**6)
        with log.open("r+b") as file:
            file.truncate(0)
            file.write(b"x" * len(OLD) + NEW * (size // len(NEW) + 2))
        with pytest.raises(Unsafe, match="truncated or replaced"):
            source.check()


def test_a_log_that_shrinks_between_two_reads_is_refused_although_it_is_the_same_so_far(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_bytes(BEATS * 9)
    source = opened(log)
    with closing(source):
        source.read(100)
        log.open("r+b").truncate(len(BEATS) * 3)
        with pytest.raises(Unsafe, match="truncated or replaced"):
            source.read(100)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (BEATS * 1000, BEATS * 400 + b"new\n" * 4000),
        (b"# " + b"x" * 5000 + b"\na\n", b"# " + b"x" * 5000 + b"\nb\nc\n"),
        (BEATS * 100_000 + b"error 1\n" + BEATS * 100_000, BEATS * 100_000 + b"error 2\n" + BEATS * 100_001),
    ],
    ids=["the same beginning", "the same preamble", "the same beginning and the same last megabyte"],
)
def test_a_file_that_was_replaced_between_two_runs_is_refused(old: bytes, new: bytes, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_bytes(old)
    with closing(opened(log)) as source:
        source.read(10**6)
        position = source.position
    log.write_bytes(new)
    with pytest.raises(Unsafe, match="begins with other bytes"):
        opened(log, position)


def test_a_file_that_has_grown_is_continued_after_what_was_copied(tmp_path: Path) -> None:
    log, got, position = tmp_path / "access.log", list[bytes](), None
    for part in (OLD, NEW[:40], NEW[40:] + b"tail", b"\n"):
        with log.open("ab") as file:
            file.write(part)
        with closing(opened(log, position)) as source:
            for most in (1, 100):
                got += lines_of(source.read(most))
                source.check()
            position = source.position
    assert got == (OLD + NEW + b"tail").split(b"\n")


def test_a_log_that_is_removed_while_it_is_read_is_named(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    log.write_bytes(OLD)
    with closing(opened(log)) as source:
        source.read(3)
        log.unlink()
        with pytest.raises(SourceError, match=f"{log}: No such file"):
            source.read(3)


def test_a_directory_is_no_file_of_lines(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"Is a directory\. Correct its name"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("collation", "first", "second"), [("NOCASE", "b", "B"), ("NOCASE", "B", "b"), ("RTRIM", "b", "b  ")]
)
@pytest.mark.parametrize("late", [False, True], ids=["before the first read", "after the first read"])
def test_rows_that_are_equal_for_the_database_are_all_copied_or_refused(
    collation: str, first: str, second: str, *, late: bool, tmp_path: Path
) -> None:
    path = tmp_path / "shop.db"
    got: list[str] = []
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"CREATE TABLE t (name TEXT COLLATE {collation})")
        added = [("a",), (first,), (second,), ("c",)]
        database.executemany("INSERT INTO t VALUES (?)", added[: 2 if late else 3])
        database.commit()
        position, refused = None, False
        for _ in range(5):
            with closing(QueryRows(path, "SELECT * FROM t", "name")) as source:
                source.open(TASK, position)
                try:
                    got += [json.loads(decode(one.value).payload)["name"] for one in source.read(2).outputs]
                except SourceError as error:
                    assert "another row has the same value, as the database compares values" in str(error)
                    refused = True
                    break
                position = source.position
            if late:
                database.executemany("INSERT INTO t VALUES (?)", added[2:])
                database.commit()
                late = False
    assert refused or {first, second} <= set(got)

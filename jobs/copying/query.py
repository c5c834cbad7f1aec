"""The rows of a database query, as the source of a copy."""

import re
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from envelope import EnvelopeError
from envelope.event_ids import EventIds
from jobs.copying.counts import CopyStatistics
from jobs.copying.source import ItemWriter, Output, Position, Read, SourceError, Task, changed
from persistence.finite_json import json_of

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_FETCH: Final = 1_000
_UNWRITABLE: Final = (EnvelopeError, TypeError, ValueError, OverflowError, RecursionError)
"""What says that JSON does not have a value."""
_PARAMETERS: Final = {"qmark": "?", "format": "%s", "pyformat": "%(after)s", "named": ":after", "numeric": ":1"}


class QueryRows:
    """The rows of a query on a database with a DB-API driver (PEP 249), in the order of one column.

    A row becomes a JSON object with a field for each column. Sequence ids count the rows from 0.

    The values of the column are unique and ascend in the order in which rows become visible: a row that is committed
    later with a lower value is not copied. An automatic key is such a column only if one transaction at a time inserts.

    Args:
        connect: Returns a connection, or the path of an SQLite file.
        query: A SELECT without ORDER BY. It is used as a subquery.
        column: Name of the column. Its values are whole numbers or texts.
        key: Name of the column that is the record's key; None for no key.
        event_id: Event ids: `coordinates`, `field:NAME` or `hash:NAME,NAME`; None for none.
        paramstyle: The driver's style of parameters; None to ask its module.

    Raises:
        ValueError: The column is not a plain name, or the event id is invalid.
    """

    kind = "query"

    def __init__(
        self,
        connect: Callable[[], Any] | str | Path,
        query: str,
        column: str,
        *,
        key: str | None = None,
        event_id: EventIds | str | None = None,
        paramstyle: str | None = None,
    ) -> None:
        if not _NAME.match(column):
            raise ValueError(f"column {column!r}: write the name of a column of the query, without quotes")
        self._connect = _sqlite(connect) if isinstance(connect, str | Path) else connect
        self._query = query.strip().rstrip(";")
        self._column, self._key = column, key
        self._event_ids = EventIds.parse(event_id) if isinstance(event_id, str) else event_id
        self._paramstyle = paramstyle
        self._connection: Any = None
        self._rows: Iterator[tuple[Any, dict[str, Any]]] | None = None
        self._after: int | str | None = None
        self._count = 0
        self._caught_up = False

    def reads(self, target: str) -> bool:
        return False

    def open(self, task: Task, position: Position | None) -> None:
        self._writer = ItemWriter(task, key=self._key, event_ids=self._event_ids, content_type="application/json")
        if position is not None:
            if position["column"] != self._column:
                raise changed(f"the rows were copied in the order of {position['column']}, not of {self._column}")
            self._after, self._count = position["after"], position["rows"]
        try:
            self._connection = self._connect()
        except Exception as error:  # DB-API has a class of errors for each driver
            raise SourceError(
                f"the database cannot be opened: {error}", "Check its name, the user's rights, and that it answers"
            ) from error
        style = self._paramstyle or _style(self._connection)
        if style not in _PARAMETERS:
            raise SourceError(f"unknown paramstyle {style}", f"Give one of {', '.join(_PARAMETERS)}")
        self._paramstyle = style

    def read(self, most: int) -> Read:
        outputs: list[Output] = []
        if self._rows is None:
            self._rows = self._selected()
        for value, row in self._rows:
            place = f"row {self._count} in the order of {self._column}"
            outputs.append(self._writer.write(_json(row, place), self._count, place, lambda fields=row: fields))  # type: ignore[misc]
            self._after = value
            self._count += 1
            if len(outputs) == most:
                break
        else:
            self._rows, self._caught_up = None, True
        return Read(outputs, CopyStatistics(read=len(outputs), written=len(outputs)))

    def check(self) -> None:
        """A result does not change while it is read."""

    @property
    def position(self) -> Position:
        return {"column": self._column, "after": self._after, "rows": self._count}

    @property
    def sequence(self) -> int | None:
        return self._count - 1 if self._count else None

    @property
    def caught_up(self) -> bool:
        return self._caught_up

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _selected(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The rows after the position. Each is held until the next one shows that its value is unique."""
        cursor = self._connection.cursor()
        rows, column = f"({self._query}) AS headwater_rows", self._column
        equal: Sequence[Any] = ()
        try:
            if self._after is None:
                cursor.execute(f"SELECT * FROM {rows} ORDER BY {column}")  # noqa: S608 - the user's own query
            else:
                style = self._paramstyle or ""
                given = {"after": self._after} if style in ("pyformat", "named") else (self._after,)
                if style in ("pyformat", "format"):
                    rows = rows.replace("%", "%%")  # with parameters, these drivers read every % as one
                after = _PARAMETERS[style]
                cursor.execute(f"SELECT {column} FROM {rows} WHERE {column} = {after}", given)  # noqa: S608
                equal = cursor.fetchall()
                cursor.execute(f"SELECT * FROM {rows} WHERE {column} > {after} ORDER BY {column}", given)  # noqa: S608
        except Exception as error:  # DB-API has a class of errors for each driver
            raise SourceError(
                f"the query failed: {error}", "Try it in the database's own client, as a subquery with the column"
            ) from error
        # A database may take texts for equal that differ in case, accents or trailing spaces.
        if len(equal) > 1 or any(one[0] != self._after for one in equal):
            raise self._twice(self._count - 1)
        names = [one[0] for one in cursor.description]
        at = next((i for i, name in enumerate(names) if name.lower() == self._column.lower()), None)
        if at is None:
            raise SourceError(f"the query has no column {self._column}", f"It has {', '.join(names)}")
        held: tuple[Any, dict[str, Any]] | None = None
        while fetched := self._fetched(cursor):
            for row in fetched:
                value = row[at]
                if isinstance(value, bool) or not isinstance(value, int | str):
                    raise SourceError(
                        f"column {self._column} has a value of type {type(value).__name__}, not a whole number or a text",
                        "Convert it in the query (CAST), and leave rows without a value out",
                    )
                if held is not None:
                    if held[0] == value:
                        raise self._twice(self._count)
                    yield held
                held = value, dict(zip(names, row, strict=True))
        cursor.close()
        if self._connection is not None and hasattr(self._connection, "rollback"):
            self._connection.rollback()  # the next select sees later rows
        if held is not None:
            yield held

    def _twice(self, row: int) -> SourceError:
        return SourceError(
            f"row {row} in the order of {self._column}: another row has the same value, as the database compares values, and "
            "would be lost when the copy continues",
            "Order by a column with unique values, or have the database compare its texts by their bytes (COLLATE)",
        )

    def _fetched(self, cursor: Any) -> Sequence[Any]:
        try:
            return cursor.fetchmany(_FETCH)  # type: ignore[no-any-return]  # DB-API has no types
        except Exception as error:  # DB-API has a class of errors for each driver
            raise SourceError(
                f"the rows after {self._column} {self._after!r} cannot be read: {error}",
                "Try the query in the database's own client; convert columns that the driver cannot read (CAST)",
            ) from error


def _json(row: dict[str, Any], place: str) -> bytes:
    try:
        return json_of(row)
    except _UNWRITABLE:
        for name, value in row.items():
            try:
                json_of(value)
            except _UNWRITABLE:
                what = f"a value of type {type(value).__name__} that JSON does not have"
                raise SourceError(
                    f"{place}: column {name} has {what}", "Convert it in the query (CAST, COALESCE)"
                ) from None
        raise


def _sqlite(path: str | Path) -> Callable[[], sqlite3.Connection]:
    """Connections that only read an existing file."""
    return lambda: sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)


def _style(connection: Any) -> str:
    """What the driver's module declares: the package of the connection's class, or one around it."""
    name = type(connection).__module__
    while name:
        if (found := getattr(sys.modules.get(name), "paramstyle", None)) is not None:
            return str(found)
        name = name.rpartition(".")[0]
    return "qmark"

"""Drivers with Python's DB-API (PEP 249) over SQLite, one for each style of parameters.

With parameters, those of the styles `format` and `pyformat` replace `%` in the whole text, as psycopg and MySQL's do.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

STYLES = ("qmark", "format", "pyformat", "named", "numeric")


class Cursor:
    def __init__(self, style: str, cursor: sqlite3.Cursor) -> None:
        self._style, self._cursor = style, cursor

    def execute(self, operation: str, parameters: Any = None) -> None:
        if parameters is None:
            self._cursor.execute(operation)
            return
        if self._style in ("pyformat", "named") and not isinstance(parameters, dict):
            raise TypeError("parameters have names")
        if self._style == "format":
            operation %= ("?",) * len(parameters)
        elif self._style == "pyformat":
            operation %= {name: f":{name}" for name in parameters}
        elif self._style == "numeric":
            operation = operation.replace(":1", "?1")
        self._cursor.execute(operation, parameters)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


def driver(style: str, path: Path) -> tuple[ModuleType, Callable[[], Any]]:
    """A driver that is a package within another, as `mysql.connector` is, and a function that connects by it."""
    module = ModuleType(f"vendor_{style}.connector")
    module.paramstyle = style  # type: ignore[attr-defined]

    class Connection:
        __module__ = f"vendor_{style}.connector.network"

        def __init__(self) -> None:
            self._connection = sqlite3.connect(path)

        def cursor(self) -> Cursor:
            return Cursor(style, self._connection.cursor())

        def rollback(self) -> None:
            self._connection.rollback()

        def close(self) -> None:
            self._connection.close()

    return module, Connection

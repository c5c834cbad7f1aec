"""The flights of 2013 as messages, and the expected totals of every aircraft and carrier."""

from importlib.resources import files
from typing import Any, Final

import polars as pl

from persistence.kafka import Message

ALL: Final = 336_776
FIELDS: Final = ("legs", "air_minutes", "dep_delay", "arr_delay", "worst_delay", "cancelled")
"""The totals per aircraft and per carrier."""
_COLUMNS: Final = [
    "time_hour", "carrier", "flight", "tailnum", "origin", "dest",
    "dep_time", "dep_delay", "arr_time", "arr_delay", "air_time",
]  # fmt: skip


def load(count: int) -> pl.DataFrame:
    """Return the first `count` flights of the year, at most `ALL`. See the README beside the data for the columns."""
    data = files("jobs") / "data" / "flights-2013.parquet"
    return pl.read_parquet(data.read_bytes(), columns=_COLUMNS).head(count)


def messages(flights: pl.DataFrame) -> list[Message]:
    """Return each flight as a JSON object with its tail number as the key; the key is null if it has none."""
    values = flights.select(value=pl.struct(pl.all()).struct.json_encode())["value"]
    return [
        {"value": value.encode(), "key": None if tail is None else tail.encode()}
        for value, tail in zip(values, flights["tailnum"], strict=True)
    ]


def expected(flights: pl.DataFrame, by: str) -> dict[str, dict[str, Any]]:
    """Return the expected totals, computed from the table without a stream.

    A flight without a tail number counts nowhere.

    Args:
        flights: The produced flights.
        by: `tailnum` or `carrier`.

    Returns:
        Key to fields.
    """
    flown = pl.col("dep_time").is_not_null()
    found = (
        flights.filter(pl.col("tailnum").is_not_null())
        .group_by(by)
        .agg(
            legs=flown.sum(),
            air_minutes=pl.col("air_time").cast(pl.Int64).sum(),
            dep_delay=pl.col("dep_delay").cast(pl.Int64).sum(),
            arr_delay=pl.col("arr_delay").cast(pl.Int64).sum(),
            worst_delay=pl.col("arr_delay").max(),
            cancelled=(~flown).sum(),
        )
    )
    return {row.pop(by): row for row in found.iter_rows(named=True)}

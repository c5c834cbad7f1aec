"""Worlds whose stages have sessions: an event happens as many minutes after 1970 as its payload's `x` says."""

from collections.abc import Iterable
from typing import Any

import polars as pl

from aggregations.definition.sessions import SessionWindow, session
from tests.simulation.functions import Payload

MINUTE_US = 60_000_000
WINDOW: SessionWindow = session("7m", lateness="3650d")
"""Some keys have several sessions, which later events connect. Nothing comes too late."""
TIME = pl.col("x") * 60_000


def whole(state: Any) -> dict[str, int]:
    """What all sessions of a key hold together: numbers by id, or the counts of a stage that only counts."""
    found: dict[str, int] = {}
    for _, _, one in state or ():
        for name, number in one.items():
            found[name] = found.get(name, 0) + number
    return found


def divided(items: Iterable[tuple[int, Payload]]) -> list[list[Any]]:
    """The sessions of a key.

    Args:
        items: Time in minutes, and what the item adds to the state of its session.
    """
    found: list[list[Any]] = []
    for minute, adds in sorted(items, key=lambda one: one[0]):
        if not found or minute - found[-1][1] > WINDOW.gap // 60:
            found.append([minute, minute, {}])
        found[-1][1], state = minute, found[-1][2]
        for name, number in adds.items():
            state[name] = state.get(name, 0) + number
    return [[start * MINUTE_US, end * MINUTE_US, state] for start, end, state in found]

"""The size of filters' states, as the page about filters says it."""

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest

from envelope.filters import (
    Arrival,
    EventIdFilter,
    FilterStates,
    ProducerFilter,
    SequenceFilter,
    SequenceMaps,
    SessionWindows,
    Stamp,
    TimeWindows,
    deduplicate_by_key,
    distinct,
)

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "filters.md").read_text()
ROWS = dict(re.findall(r"^\| (.+?) \| about (\d+) for each", PAGE, re.MULTILINE))
COUNT = 1000
NAME = "customer-000000"
HOUR = timedelta(hours=1)


def size(rule, value) -> float:
    """Bytes for each of a thousand keys, without the key."""
    states = FilterStates(rule)
    for n in range(COUNT):
        states.judge(Arrival("t", 0, 10**9 + n, f"customer-{n:06}".encode(), value(n), 1_700_000_000_000 + n))
    [dumped] = states.dump().values()
    return len(json.dumps(dumped, separators=(",", ":"))) / COUNT - len(NAME)


SIZES = {
    "`deduplicate...`": lambda: size(deduplicate_by_key(HOUR), lambda n: None),
    "`distinct`, tumbling": lambda: size(distinct(TimeWindows(HOUR)), lambda n: None),
    "`distinct`, sessions": lambda: size(distinct(SessionWindows(HOUR)), lambda n: None),
    "`ProducerFilter`": lambda: size(
        ProducerFilter(lambda one: one.value), lambda n: Stamp(f"customer-{n:06}", 10**6 + n, contiguous=True)
    ),
    "`EventIdFilter`": lambda: size(EventIdFilter(lambda one: one.value, HOUR), lambda n: f"customer-{n:06}"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_state_has_as_many_bytes_for_a_key_as_the_page_says(name: str) -> None:
    assert SIZES[name]() == pytest.approx(int(ROWS[name]), abs=5)


def test_a_snapshot_has_as_many_bytes_for_a_producer_as_the_page_says() -> None:
    maps = SequenceMaps()
    for n in range(COUNT):
        maps.push(f"customer-{n:06}", 10**6 + n)
        maps.acknowledged(n)
    text = json.dumps(maps.snapshot().dump(), separators=(",", ":"))
    assert len(text) / COUNT - len(NAME) == pytest.approx(int(ROWS["`SequenceMaps`"]), abs=5)


def test_the_state_of_a_sequence_filter_has_as_many_bytes_as_the_page_says() -> None:
    states = FilterStates(SequenceFilter(lambda one: one.value))
    sizes = []
    for n, number in enumerate([1, -(1 << 63), (1 << 63) - 1]):
        key = b"%d" % abs(number)
        states.judge(Arrival("t", n, 0, key, number))
        sizes.append(len(json.dumps(states.dump()[b"t:%d" % n], separators=(",", ":"))))
    low, high = map(int, re.search(r"`SequenceFilter` \| (\d+) to (\d+) for", PAGE).groups())
    assert low <= min(sizes)
    assert max(sizes) <= high
    assert set(ROWS) == {*SIZES, "`SequenceMaps`"}

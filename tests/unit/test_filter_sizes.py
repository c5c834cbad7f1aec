"""The size of filters' states, as the page about filters says it."""

import re
from pathlib import Path

import pytest

from benchmarks.filter_sizes import SIZES, of_a_number

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "filters.md").read_text()
ROWS = dict(re.findall(r"^\| (.+?) \| (\d+) for each", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", SIZES)
def test_a_state_has_as_many_bytes_as_the_page_says(name: str) -> None:
    assert round(SIZES[name]()) == int(ROWS[name])


def test_the_page_names_every_filter() -> None:
    assert ROWS.keys() == SIZES.keys()
    low, high = map(int, re.search(r"`SequenceFilter` \| (\d+) to (\d+) for", PAGE).groups())
    assert (low, high) == of_a_number()

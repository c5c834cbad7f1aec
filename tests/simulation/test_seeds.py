"""Two thousand worlds; `python -m jobs.simulation --seed N` runs one of them again."""

import pytest

from jobs.simulation.shrink import outcome

CHUNK = 100


@pytest.mark.parametrize("start", range(0, 2000, CHUNK), ids=lambda start: f"from {start}")
def test_every_message_is_folded_once_in_any_world(start):
    failed = {seed: text for seed in range(start, start + CHUNK) if (text := outcome(seed))}
    assert not failed

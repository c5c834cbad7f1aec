"""Names of lanes and the partitions in them."""

import pytest

from envelope.dedup.lanes import lane_of, names_partition, parts_of

TWO_HOPS = "raw:0#R>rep>legs:3>sum>totals:5"


def test_a_lane_is_taken_apart_into_its_group_and_its_partitions_and_put_together_again() -> None:
    assert parts_of(TWO_HOPS) == ("raw:0#R>rep>legs>sum>totals", (3, 5))
    assert lane_of("raw:0#R>rep>legs>sum>totals", (3, 5)) == TWO_HOPS


@pytest.mark.parametrize(
    ("lane", "names"),
    [
        ("raw:0#R", True),
        ("raw:0#R>rep>legs:3", True),
        ("raw:0#R>rep>legs", False),
        ("raw:0#R>rep>legs>sum>totals:5", True),
        ("raw:0#R>rep>legs:3>sum>totals", False),
    ],
)
def test_a_lane_names_the_partition_of_its_last_hop_or_of_its_root(lane: str, names: bool) -> None:
    assert names_partition(lane) == names

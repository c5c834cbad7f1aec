"""Names of lanes and the partitions in them."""

import pytest

from envelope.dedup.lanes import group_at, lane_of, names_partition, parts_of, path_of

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


@pytest.mark.parametrize(
    ("group", "path", "partition"),
    [
        ("raw:12#R>rep>legs", "raw#R>rep>legs", "12"),
        ("!west/raw:0#", "!west/raw#", "0"),
        ("a:b:0#R#>r>c:1", "a:b#R#>r>c:1", "0"),
        ("raw#R>rep>legs", "raw#R>rep>legs", ""),
        ("raw:0", "raw:0", ""),
        ("raw:#R", "raw:#R", ""),
        ("7#R", "7#R", ""),
        ("", "", ""),
    ],
)
def test_a_group_is_taken_apart_into_its_path_and_the_partition_of_the_root(
    group: str, path: str, partition: str
) -> None:
    assert path_of(group) == (path, partition)
    assert group_at(path, partition) == group

"""Lists of integers in a state record."""

import pytest

from persistence.columns import (
    Column,
    ascending_of,
    check_column,
    numbers_of,
    plain_column,
    shortest_column,
    steps_of,
)
from persistence.seal import DamagedError

SPREAD = [7, 1007, 450, 23, 999]


@pytest.mark.parametrize(
    ("numbers", "steps"),
    [
        ([3], [3]),
        ([0, 1, 2, 3], [0, -3]),
        ([5, 6, 7, 9], [5, 1, 1, 2]),
        ([5, 6, 8, 9, 12], [5, 1, 2, 1, 3]),
        ([4, 4, 5, 6, 7], [4, 0, -3]),
        ([4, 5, 6, 8, 9], [4, -2, 2, 1]),
    ],
)
def test_ascending_numbers_are_steps_and_runs_of_one(numbers: list[int], steps: list[int]) -> None:
    assert steps_of(numbers) == steps
    assert ascending_of(steps) == numbers


@pytest.mark.parametrize(
    ("numbers", "plain", "shortest"),
    [
        ([3, 3, 3], 3, 3),
        ([-1], -1, -1),
        ([3, 4, 3], [3, 0, 1, 0], [3, 0, 1, 0]),
        (SPREAD, [7, 0, 1000, 443, 16, 992], "7:10:AAD6G7BD4A=="),
        ([-1, 2**63 - 1] * 3, [-1, 0, 2**63, 0, 2**63, 0, 2**63], None),
    ],
)
def test_a_column_is_one_number_or_differences_or_packed_if_that_is_shorter(
    numbers: list[int], plain: Column, shortest: Column | None
) -> None:
    assert plain_column(numbers) == plain
    if shortest is not None:
        assert shortest_column(numbers) == shortest
    for column in (plain, shortest_column(numbers)):
        check_column(column, len(numbers))
        assert list(numbers_of(column, len(numbers))) == numbers


def test_of_two_equally_long_columns_the_readable_one_is_written() -> None:
    assert len("[0,0,10,0]") == len('"0:4:AKA="')
    assert shortest_column([0, 10, 0]) == [0, 0, 10, 0]


@pytest.mark.parametrize(
    "column",
    [
        [],
        [7],
        [7, 0, 1],
        [7, 0, 1, 2, 3, 4, 5],
        "",
        "7:10",
        "7:10:AAD6G7BD4A==:",
        "x:10:AAD6G7BD4A==",
        "7:x:AAD6G7BD4A==",
        "7:9:AAD6G7BD4A==",
        "7:12:AAD6G7BD4A==",
        "7:10:AAD6G7BD",
        "7:10:AAD6 G7BD4A==",
        "7:10:BAD6G7BD4A==",
        "7:0:",
        "7:-1:",
    ],
)
def test_a_column_that_was_never_written_is_damaged(column: Column) -> None:
    with pytest.raises(DamagedError):
        check_column(column, len(SPREAD))


@pytest.mark.parametrize("steps", [[-1, 2], [1, -(1 << 20) - 1]])
def test_steps_that_were_never_written_are_damaged(steps: list[int]) -> None:
    with pytest.raises(DamagedError):
        ascending_of(steps)


def test_the_longest_run_is_read() -> None:
    assert len(ascending_of([1, -(1 << 20)])) == 1 + (1 << 20)

"""Two sets of states are compared key by key and field by field."""

import json
import math
from typing import Any

import pytest

from aggregations.definition.values import Exact
from jobs.comparing import Likeness, Row, Seen, StageDifferences, alike, compare

STAGE = "totals"


def differences(old: Any, new: Any) -> StageDifferences:
    """The differences of one key with these results."""
    return compare([row(b"k", old)], [row(b"k", new)], stages=[STAGE]).stages[STAGE]


def row(key: bytes, *results: Any) -> Row:
    """A state: without results it has only dead letters."""
    return Row(STAGE, key, {key + b"@%d" % i if i else key: Seen.of(one) for i, one in enumerate(results)})


@pytest.mark.parametrize(
    ("old", "new", "likeness"),
    [
        (1, 1.0, Likeness.EQUAL),
        (1, True, Likeness.DIFFERENT),
        (None, 0, Likeness.DIFFERENT),
        (0.1 + 0.2, 0.3, Likeness.ROUNDED),
        (10**16, 10**16 + 1, Likeness.DIFFERENT),
        pytest.param(10**400, 1.5, Likeness.DIFFERENT, id="huge"),
        (1.0, 1.0 + 1e-6, Likeness.DIFFERENT),
        (math.nan, math.nan, Likeness.EQUAL),
        (math.inf, 1.0, Likeness.DIFFERENT),
        ([1, [0.1 + 0.2]], [1, [0.3]], Likeness.ROUNDED),
        ([1, 2], [1], Likeness.DIFFERENT),
        ({"a": 1, "b": "x"}, {"b": "x", "a": 1}, Likeness.EQUAL),
        ({"a": 1}, {"a": 1, "b": None}, Likeness.DIFFERENT),
        ("1", 1, Likeness.DIFFERENT),
        ((1, 2), [1, 2], Likeness.EQUAL),
        (Exact(0.1 + 0.2), 0.3, Likeness.DIFFERENT),
        ([Exact(0.3)], [0.3], Likeness.EQUAL),
    ],
)
def test_two_values_agree_exactly_by_rounding_or_not(old: Any, new: Any, likeness: Likeness) -> None:
    assert alike(old, new) is likeness
    assert alike(new, old) is likeness


def test_a_difference_by_rounding_is_counted_apart() -> None:
    found = differences({"sum": 0.1 + 0.2, "n": 3}, {"sum": 0.3, "n": 3})
    assert (found.rounded, found.changed, found.differences, found.sample) == (1, 0, 0, [])
    assert (found.fields["sum"].rounded, found.fields["sum"].changed) == (1, 0)


def test_sums_of_differences_are_exact() -> None:
    keys = [b"%03d" % n for n in range(100)]
    old = [row(key, {"n": 2**62, "x": 0.1}) for key in keys]
    new = [row(key, {"n": 2**62 + 1, "x": 0.2}) for key in keys]
    found = compare(old, new, stages=[STAGE]).stages[STAGE].fields
    assert (found["n"].total, found["n"].largest, found["n"].numbers) == (100, 1, 100)
    assert found["x"].total == pytest.approx(10.0, rel=1e-15)
    new[50] = row(keys[50], {"n": 0, "x": -math.inf})
    found = compare(old, new, stages=[STAGE]).stages[STAGE].fields
    assert (found["n"].total, found["n"].largest) == (99 - 2**62, -(2**62))
    assert (found["x"].changed, found["x"].numbers) == (100, 99)  # infinity has no difference


def test_a_number_that_no_floating_point_number_holds_has_a_difference() -> None:
    found = differences({"n": 1.5}, {"n": 10**400}).fields["n"]
    assert found.total == found.largest == math.inf


def test_a_field_of_one_side_is_changed_and_others_are_not() -> None:
    found = differences({"n": 1}, {"n": 1, "late": None})
    assert (found.changed, found.fields["late"].changed, found.fields["n"].changed) == (1, 1, 0)
    assert found.as_json()["fields"] == {"late": {"changed": 1, "rounded": 0, "numbers": 0}}


def test_a_field_that_depends_on_chance_is_compared_by_what_does_not() -> None:
    old, new = Seen({"q": [5.0, 9.0]}, {"q": {"n": 3}}), Seen({"q": [6.0, 9.0]}, {"q": {"n": 3}})
    one = lambda seen: [Row(STAGE, b"k", {b"k": seen})]
    assert compare(one(old), one(new), stages=[STAGE]).differences == 0
    other = Seen({"q": [5.0, 9.0]}, {"q": {"n": 4}})
    [found] = compare(one(old), one(other), stages=[STAGE]).stages[STAGE].sample
    assert (found.old, found.new) == ({"q": [5.0, 9.0]}, {"q": [5.0, 9.0]})


def test_a_state_with_dead_letters_alone_is_as_good_as_none() -> None:
    assert compare([row(b"k")], [], stages=[STAGE]).differences == 0
    assert compare([row(b"k")], [row(b"k", 1)], stages=[STAGE]).stages[STAGE].only_new == 1


def test_a_key_may_have_several_results() -> None:
    found = compare([row(b"k", 1, 2)], [row(b"k", 1, 3, 4)], stages=[STAGE]).stages[STAGE]
    assert (found.same, found.changed, found.only_new) == (1, 1, 1)
    assert [(one.key, one.old, one.new) for one in found.sample] == [(b"k@1", 2, 3), (b"k@2", None, 4)]


def test_states_out_of_order_are_an_error() -> None:
    unordered = [row(b"b", 1), row(b"a", 1)]
    for old, new in ((unordered, []), ([], unordered), ([], [row(b"a", 1), row(b"a", 1)])):
        with pytest.raises(ValueError, match="stage totals"):
            compare(old, new, stages=[STAGE])


def test_differences_are_written_as_json() -> None:
    old, new = [row(b"a", {"n": 1}), row(b"\xff", {"n": 1})], [row(b"a", {"n": 3})]
    found = compare(old, new, stages=[STAGE, "empty"])
    assert json.loads(json.dumps(found.as_json())) == {
        STAGE: {
            "same": 0,
            "rounded": 0,
            "changed": 1,
            "only_old": 1,
            "only_new": 0,
            "fields": {"n": {"changed": 1, "rounded": 0, "numbers": 1, "sum": 2, "largest": 2}},
            "sample": [
                {"key": "a", "old": {"n": 1}, "new": {"n": 3}},
                {"key_base64": "/w==", "old": {"n": 1}, "new": None},
            ],
        },
        "empty": {
            "same": 0, "rounded": 0, "changed": 0, "only_old": 0, "only_new": 0, "fields": {}, "sample": [],
        },
    }  # fmt: skip


def test_the_sample_is_bounded_and_progress_is_told() -> None:
    told: list[int] = []
    rows = [row(b"%04d" % n, n) for n in range(2_500)]
    found = compare(rows, [], stages=[STAGE], sample=3, progress=lambda done, _total: told.append(done))
    assert (len(found.stages[STAGE].sample), found.differences) == (3, 2_500)
    assert told == [1_000, 2_000, 2_500]

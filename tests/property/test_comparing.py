"""The comparison of two sets of states against a plain comparison of two dictionaries."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jobs.comparing import Row, Seen, compare

STAGES = ["second", "first"]
_results = st.fixed_dictionaries(
    {}, optional={"n": st.integers(-3, 3), "text": st.sampled_from("ab"), "big": st.integers(-(2**70), 2**70)}
)
_sets = st.dictionaries(st.tuples(st.sampled_from(STAGES), st.binary(max_size=2)), _results, max_size=12)


def rows(states: Mapping[tuple[str, bytes], Any]) -> list[Row]:
    """The states in order, each under its own key."""
    ordered = sorted(states, key=lambda one: (STAGES.index(one[0]), one[1]))
    return [Row(stage, key, {key: Seen.of(states[stage, key])}) for stage, key in ordered]


def numeric(old: Any, new: Any, field: str) -> bool:
    return type(old.get(field)) is int and type(new.get(field)) is int and old[field] != new[field]


@given(_sets, _sets, st.integers(0, 3))
def test_a_comparison_counts_what_a_plain_one_finds(old: Any, new: Any, sample: int) -> None:
    found = compare(rows(old), rows(new), stages=STAGES, sample=sample)
    for stage in STAGES:
        olds = {key: one for (name, key), one in old.items() if name == stage}
        news = {key: one for (name, key), one in new.items() if name == stage}
        both = olds.keys() & news.keys()
        changed = {key for key in both if olds[key] != news[key]}
        one = found.stages[stage]
        assert (one.only_old, one.only_new) == (len(olds.keys() - news.keys()), len(news.keys() - olds.keys()))
        assert (one.changed, one.same, one.rounded) == (len(changed), len(both) - len(changed), 0)
        differing = sorted(changed | (olds.keys() ^ news.keys()))
        assert [(one.key, one.old, one.new) for one in one.sample] == [
            (key, olds.get(key), news.get(key)) for key in differing[:sample]
        ]
        for field in ("n", "big"):
            changes = [
                news[key][field] - olds[key][field] for key in sorted(both) if numeric(olds[key], news[key], field)
            ]
            counted = one.fields.get(field)
            missing = sum((field in olds[key]) != (field in news[key]) for key in both)
            if counted is None:
                assert not changes
                assert not missing
                continue
            assert (counted.total, counted.largest) == (sum(changes), max(changes, key=abs, default=0))
            assert (counted.changed, counted.numbers) == (len(changes) + missing, len(changes))
    assert found.differences == sum(one.differences for one in found.stages.values())
    assert (found.differences == 0) == (old == new)


@given(_sets)
def test_equal_states_have_no_differences(states: Any) -> None:
    assert compare(rows(states), rows(states), stages=STAGES).differences == 0

"""Topic ids of a topic that was created again."""

from aggregations.run.incarnations import Incarnations, merge_incarnations
from envelope import Verdict


def test_ids_of_a_topic_are_told_apart_by_age():
    current = {"raw": "now", "other": "first"}
    seen = Incarnations({"raw": ("old", "now")}, current)
    assert seen.verdict("raw", "now") is None
    assert seen.verdict("raw", "old") is Verdict.STALE_INCARNATION
    assert seen.verdict("raw", "never seen") is Verdict.STALE_INCARNATION
    assert seen.verdict("raw", "") is None
    assert seen.verdict("other", "first") is None
    assert seen.verdict("unknown to the broker", "any") is None
    assert seen.merged() == {"raw": ("old", "now"), "other": ("first",)}
    later = Incarnations(seen.merged(), current | {"raw": "next"})
    assert later.verdict("raw", "now") is Verdict.STALE_INCARNATION
    assert later.verdict("raw", "next") is Verdict.NEW_INCARNATION
    assert later.merged() == {"raw": ("old", "now", "next"), "other": ("first",)}


def test_ids_known_before_come_first_when_they_are_merged():
    assert merge_incarnations({"t": ("a",)}, {"t": ["b", "a"]}, {"u": ["c"]}) == {"t": ("a", "b"), "u": ("c",)}

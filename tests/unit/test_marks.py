"""Marks: a history that holds what was acknowledged, and one that does not."""

import pytest

from persistence.errors import StoreWentBack
from persistence.marks import LIVES, Bucket, KnownMarks, Mark, bucket_of_parts, encode_downstream
from persistence.names import FlowRef

FLOW = FlowRef("fleet")
ONE = Mark().next("a").next("a").next("a")


def test_a_mark_is_read_as_it_was_written():
    for mark in (Mark(), Mark(7), ONE, ONE.next("b")):
        assert Mark.parse(str(mark)) == mark
    assert str(ONE.next("b")) == "4 b:3 a:0"
    assert ONE.next("b").short == "4 b"
    assert Mark.parse("") == Mark()


def test_a_history_holds_every_mark_that_was_acknowledged_in_it():
    mark, before = Mark(), []
    for life in ("a", "a", "b", "b", "c"):
        mark = mark.next(life)
        before.append(mark)
        assert all(mark.holds(Mark.parse(one.short)) for one in before)
    assert not before[0].holds(mark)


def test_a_restart_that_lost_nothing_holds_everything():
    restarted = ONE.next("b")
    assert restarted.holds(ONE)


@pytest.mark.parametrize("saves", [0, 1, 2, 9])
def test_a_bucket_that_went_back_does_not_hold_what_it_lost_however_far_it_counts_on(saves):
    older = Mark().next("a").next("a")
    for _ in range(saves):
        older = older.next("b")
    assert not older.holds(ONE)
    assert older.holds(Mark(2, (("a", 0),)))


def test_a_server_that_became_the_primary_again_does_not_hold_what_it_had_lost_before():
    lost = Mark(8, (("p", 0),))
    back = Mark(11, (("p", 9), ("r", 7), ("p", 0)))
    assert not back.holds(lost)
    assert back.holds(Mark(7, (("p", 0),)))
    assert back.holds(Mark(9, (("r", 7),)))
    assert back.holds(Mark(10, (("p", 9),)))


def test_only_the_newest_lives_are_remembered_and_older_marks_count_as_held():
    mark = Mark()
    for number in range(3 * LIVES):
        mark = mark.next(f"life{number}")
    assert len(mark.lives) == LIVES
    assert mark.holds(Mark(2, (("life1", 1),)))
    assert not mark.holds(Mark(3 * LIVES, (("other", 0),)))


def test_a_store_of_one_life_compares_counts():
    assert Mark(5).holds(Mark(5))
    assert Mark(5).holds(Mark(3))
    assert not Mark(5).holds(Mark(6))


def known_marks():
    return KnownMarks(FLOW, ["first", "second", "third"])


def test_the_newest_of_what_saves_returned_is_kept_in_any_order():
    known = known_marks()
    known.note("second", {"0": ONE.next("b"), "1": ONE})
    known.note("second", {"0": ONE})
    assert known.of("second") == {"0": ONE.next("b"), "1": ONE}


def test_two_saves_that_cannot_be_of_one_history_are_noticed_whichever_comes_first():
    lost, after = ONE, Mark().next("a").next("a").next("b")
    for first, second in ((lost, after), (after, lost)):
        known = known_marks()
        known.note("second", {"0": first})
        with pytest.raises(StoreWentBack, match=r"flow fleet.*stage second.*bucket 0 went back"):
            known.note("second", {"0": second})


def test_a_stage_is_told_what_the_stages_behind_it_have_acknowledged():
    known = known_marks()
    known.note("second", {"0": Mark(3), "1": Mark()})
    known.note("third", {"0": ONE})
    assert known.downstream("first") == {"second": {"0": "3"}, "third": {"0": "3 a"}}
    assert known.downstream("second") == {"third": {"0": "3 a"}}
    assert known.downstream("third") == {}


def test_what_a_bucket_keeps_of_others_comes_back():
    told = {"third": {"0": "3 a", "17": "4"}}
    assert bucket_of_parts(ONE, encode_downstream(7, told)) == Bucket(ONE, 7, told)
    assert encode_downstream(7, {}) == b""
    assert bucket_of_parts(ONE, b"") == Bucket(ONE)


def test_a_server_that_became_the_primary_again_does_not_hold_the_last_mark_of_its_life_before():
    """It was lost at 7, and the new life began at the same number 9 at which the old one had ended."""
    assert not Mark(11, (("p", 9), ("r", 7), ("p", 0))).holds(Mark(9, (("p", 0),)))


def test_a_short_mark_is_of_a_life_of_which_nothing_more_is_known():
    assert Mark.parse(ONE.next("b").short) == Mark(4, (("b", 0),))


def test_of_a_bucket_that_went_back_the_error_says_where_what_was_acknowledged_and_what_is_left():
    lost, after = ONE, Mark().next("a").next("b")
    said = "stage second: bucket 17 went back: save 3 a was acknowledged .* ends at save 2 b"
    known = known_marks()
    known.note("second", {"17": lost})
    with pytest.raises(StoreWentBack, match=said):
        known.learn("second", {"17": after})
    with pytest.raises(StoreWentBack, match=said):
        known.note("second", {"17": after})
    told = known_marks()
    told.learn("second", {"17": after})
    with pytest.raises(StoreWentBack, match=said):
        told.check("second", {"17": lost.short})


def test_a_run_knows_of_a_bucket_what_it_holds_now_and_compares_each_bucket_with_itself():
    known = known_marks()
    assert known.of("second") == {}
    known.note("second", {"0": ONE})
    known.learn("second", {"0": ONE.next("a"), "1": Mark()})
    known.learn("third", {"0": Mark()})
    assert known.of("second") == {"0": ONE.next("a"), "1": Mark()}
    known.check("second", {"0": ONE.short, "1": "0", "no bucket of it": "9"})
    known.check("first", {"0": "9"})
    with pytest.raises(StoreWentBack, match="bucket 1 went back"):
        known.check("second", {"0": ONE.short, "1": "1"})

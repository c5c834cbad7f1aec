"""Which partitions of a growing topic a member of a group of republishers may read, from what the group has committed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.republish.growth import Committed, Note, Readable, judge

READ = 10


def places(*notes, offset=READ):
    return {number: Committed(offset, note) for number, note in enumerate(notes)}


def verdict(found, now, *, watched=(), ends=None, **options):
    ends = ends or dict.fromkeys(range(now), READ + 5)
    return judge(found, now, watched=watched, ends=lambda: ends, **options)


RESOLVED = Note("T", 2)
SEEN = Note("T", 2, 4, 1000)
KNOWN = Note("T", 2, 4, 1000, READ)


@given(st.builds(Note, st.from_regex("[A-Za-z0-9_-]{0,22}", fullmatch=True), st.integers(1, 2**31)))
def test_what_is_noted_is_read_back(note):
    for now, seen_ms, until in ((0, 0, None), (8, 2**45, None), (8, 2**45, 0), (8, 2**45, 2**63)):
        full = Note(note.topic_id, note.resolved, now, seen_ms, until)
        assert Note.read(str(full)) == full
        assert len(str(full)) < 100


@pytest.mark.parametrize("text", ["T", "T x", "T 1 2", "T 1 2 3 4 5", "T -1", "T 1\u0663", "T  4"])
def test_of_text_that_was_written_otherwise_the_first_word_is_the_topics_id(text):
    assert Note.read(text) == Note("T")
    assert Note.read(None) == Note.read("") == Note()


def test_a_group_that_has_noted_nothing_reads_all_there_is():
    assert verdict({}, 4) == Readable(4)
    assert verdict(places(Note("T"), Note()), 4) == Readable(4)
    assert verdict(places(RESOLVED, RESOLVED), 2) == Readable(2)
    assert verdict(places(Note("T", 4), RESOLVED), 3) == Readable(4), "a broker that does not know yet"


def test_new_partitions_wait_until_every_old_one_is_at_its_end():
    assert verdict(places(RESOLVED, RESOLVED), 4, watched=(2, 4)) == Readable(2)
    for late in (RESOLVED, SEEN, Note("T", 2, 4, 1000, READ + 1)):
        assert verdict(places(KNOWN, late), 4) == Readable(2)
    assert verdict({0: Committed(READ, KNOWN)}, 4) == Readable(2), "nothing is known of 1"
    assert verdict(places(KNOWN, KNOWN), 4) == Readable(4)
    assert verdict(places(SEEN, SEEN, Note("T", 4)), 4) == Readable(4), "another member has seen it done"


def test_when_everything_is_read_nothing_waits():
    ends = {0: READ, 1: READ, 2: 0, 3: 0}
    for found in (places(RESOLVED, RESOLVED), places(Note("T", 2, 3, 1000), RESOLVED)):
        assert verdict(found, 4, ends=ends) == Readable(4)
    assert verdict(places(RESOLVED, RESOLVED), 4, ends={**ends, 3: 1}) == Readable(2, sure=False)


def test_a_growth_that_no_order_can_be_kept_in_lets_nothing_be_read():
    two = places(RESOLVED, RESOLVED)
    assert verdict(two, 3, watched=(2, 3)) == Readable(2, sure=False), "keys move between old ones"
    assert verdict(two, 4, watched=(4,)) == Readable(2, sure=False), "nobody has seen it"
    assert verdict(two, 4, watched=(1, 4)) == Readable(2, sure=False)
    assert verdict(two, 8, watched=(2, 4, 8)) == Readable(2, sure=False), "two at once"
    assert verdict(places(KNOWN, KNOWN), 8, watched=(4, 8)) == Readable(2, sure=False)
    assert verdict(places(SEEN, Note("T", 2, 8, 1000)), 8) == Readable(2, sure=False)


def test_a_growth_that_another_member_has_noted_is_not_doubted():
    assert verdict(places(SEEN, RESOLVED), 4, watched=(4,)) == Readable(2)
    assert verdict(places(RESOLVED, RESOLVED, SEEN), 4) == Readable(2), "with a new partition"


def test_who_accepts_disorder_reads_everything():
    for found in (places(RESOLVED, RESOLVED), places(SEEN, SEEN), places(KNOWN, RESOLVED)):
        assert verdict(found, 8, accepted=True) == Readable(8)


def test_the_end_of_a_partition_is_taken_when_producers_know_of_the_new_ones():
    seen = RESOLVED.grown(4, 1000, 300, lambda: 99)
    assert seen == SEEN
    assert seen.grown(4, 1299, 300, lambda: 99) == seen
    known = seen.grown(4, 1300, 300, lambda: 99)
    assert known == Note("T", 2, 4, 1000, 99)
    assert known.grown(4, 5000, 300, lambda: 100) == known
    assert seen.grown(4, 400, 300, lambda: 99) == Note("T", 2, 4, 400), "the clock was set back"
    assert known.grown(8, 5000, 300, lambda: 100) == Note("T", 2, 8, 5000)


@st.composite
def groups(draw):
    notes = st.builds(
        Note, st.just("T"), st.integers(0, 4), st.sampled_from([0, 0, 4, 6, 8]), st.just(1), st.none() | st.just(READ)
    )
    return places(*draw(st.lists(notes, max_size=8)))


@given(groups(), st.integers(1, 8), st.lists(st.integers(1, 8), max_size=3, unique=True).map(sorted))
def test_new_partitions_are_read_only_for_a_reason(found, now, watched):
    unread = verdict(found, now, watched=watched)
    resolved = max((place.note.resolved for place in found.values()), default=0)
    if not resolved or resolved >= now:
        assert unread == Readable(max(resolved, now))
        return
    assert unread.resolved in (resolved, now)
    if unread.resolved == now:
        assert {place.note.until for number, place in found.items() if number < resolved} == {READ}
    if not unread.sure:
        assert unread.resolved == resolved
        assert verdict(found, now, watched=watched, accepted=True) == Readable(now)

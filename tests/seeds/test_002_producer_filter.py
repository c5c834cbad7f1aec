"""Idempotent producers: `accept iff H(P) < S`, and `H(P) + 1 = S` where numbers are per partition."""

import random

import pytest

from envelope import Envelope, Hop, Reason, Verdict, encode
from envelope.filters import Arrival, FilterStates, Gaps, ProducerFilter, Stamp
from envelope.filters.producers import MISSING


def at(offset: int, sequence: int, *, producer="p", partition=0, time=0, topic="t", **stamp) -> Arrival:
    value = Stamp(producer, sequence, **stamp)
    return Arrival(topic, partition, offset, b"k", value, time)


def stamped(**settings) -> FilterStates:
    return FilterStates(ProducerFilter(lambda arrival: arrival.value, **settings))


def contiguous(states: FilterStates, sequences) -> list:
    return [states.judge(at(offset, number, contiguous=True)) for offset, number in enumerate(sequences)]


def test_a_message_is_accepted_if_and_only_if_its_sequence_is_above_the_high_water_mark_of_its_producer() -> None:
    random.seed(2)
    for _ in range(100):
        states, marks = stamped(), {}
        for offset in range(40):
            producer, sequence = random.choice("pq"), random.randrange(15)
            accept = producer not in marks or marks[producer] < sequence
            if accept:
                marks[producer] = sequence
            assert states.passes(at(offset, sequence, producer=producer)) is accept


def test_one_number_is_kept_for_a_producer_and_not_one_for_a_message() -> None:
    states = stamped()
    for sequence in range(1000):
        states.judge(at(sequence, sequence))
    assert states.dump()[b"t:0"]["producers"] == {"p": {"highest": 999, "exact_from": 999, "seen_ms": 0}}


def test_producers_that_take_no_part_need_do_nothing() -> None:
    states = FilterStates(ProducerFilter())
    for offset, envelope in enumerate([Envelope(b"x"), Envelope(b"x", producer="p"), Envelope(b"x", sequence=1)]):
        ruling = states.judge(Arrival("t", 0, offset, b"k", encode(envelope)))
        assert (ruling.verdict, ruling.forward) == (Verdict.UNIDENTIFIED, True)


def test_producer_and_sequence_are_read_from_the_envelope() -> None:
    states = FilterStates(ProducerFilter())
    values = [encode(Envelope(b"x", producer="till-7", sequence=n)) for n in (0, 1, 1, 0, 2)]
    assert [states.passes(Arrival("t", 0, n, b"k", value)) for n, value in enumerate(values)] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_a_republished_message_is_left_to_its_lineage() -> None:
    """Two outputs of one message have its producer and sequence, and are two messages."""
    states = FilterStates(ProducerFilter())
    for index in range(2):
        chain = (Hop("raw", 0, 17, via="split", index=index),)
        value = encode(Envelope(b"x", chain, producer="till-7", sequence=5))
        assert states.judge(Arrival("t", 0, index, b"k", value)).verdict is Verdict.UNIDENTIFIED


def test_with_one_number_for_the_topic_sequence_2_of_one_partition_read_before_1_of_another_would_lose_1() -> None:
    """Why the number is kept for each partition: the planted filter judges the topic as one."""

    class PerTopic(ProducerFilter):
        def scope(self, arrival):
            return arrival.topic.encode()

    read = [at(0, 2, partition=1), at(0, 1, partition=0)]
    lost = FilterStates(PerTopic(lambda arrival: arrival.value))
    assert [lost.passes(one) for one in read] == [True, False]
    states = stamped()
    assert [states.passes(one) for one in read] == [True, True]


def test_two_topics_have_numbers_of_their_own() -> None:
    states = stamped()
    assert [states.passes(at(0, 5, topic="t")), states.passes(at(0, 5, topic="u"))] == [True, True]


def test_a_producer_that_is_not_contiguous_may_leave_holes() -> None:
    states = stamped(gaps=Gaps.REFUSE)
    rulings = [states.judge(at(n, sequence)) for n, sequence in enumerate([3, 10, 1000])]
    assert [one.verdict for one in rulings] == [Verdict.ACCEPTED] * 3


def test_the_copies_of_a_retried_send_are_dropped() -> None:
    assert [one.verdict for one in contiguous(stamped(), [0, 1, 2, 1, 2, 3])] == [
        *[Verdict.ACCEPTED] * 3,
        *[Verdict.DUPLICATE] * 2,
        Verdict.ACCEPTED,
    ]


def test_pipelining_m1_m3_m2_is_reported_as_a_gap_and_m2_is_not_lost() -> None:
    one, three, two, again = contiguous(stamped(), [1, 3, 2, 2])
    assert (three.verdict, three.forward, three.missing) == (Verdict.GAP, True, (2, 2))
    assert (two.verdict, two.forward) == (Verdict.LATE, True)
    assert (again.verdict, again.forward) == (Verdict.DUPLICATE, False)
    assert one.forward


def test_pipelining_m1_m3_m2_comes_out_in_order_if_gaps_are_held() -> None:
    one, three, two = contiguous(stamped(gaps=Gaps.HOLD), [1, 3, 2])
    assert (three.verdict, three.forward, three.missing) == (Verdict.HELD, False, (2, 2))
    assert (two.verdict, two.forward, two.released) == (Verdict.ACCEPTED, True, (1,))
    assert (one.forward, one.released) == (True, ())


def test_pipelining_m1_m3_m2_is_refused_as_a_broker_does_until_m3_is_sent_again() -> None:
    rulings = contiguous(stamped(gaps=Gaps.REFUSE), [1, 3, 2, 3])
    assert [one.verdict for one in rulings] == [Verdict.ACCEPTED, Verdict.REJECTED, *[Verdict.ACCEPTED] * 2]
    assert rulings[1].reason is Reason.OUT_OF_SEQUENCE
    assert rulings[1].detail == "number 3 of a producer follows 1: 1 number is missing"


def test_a_session_with_a_higher_epoch_fences_the_older_ones_of_its_name() -> None:
    states = stamped()
    rulings = [states.judge(at(n, n, epoch=epoch)) for n, epoch in enumerate([1, 2, 1, 2, 3, 2])]
    assert [one.verdict for one in rulings] == [
        Verdict.ACCEPTED,
        Verdict.ACCEPTED,
        Verdict.FENCED,
        Verdict.ACCEPTED,
        Verdict.ACCEPTED,
        Verdict.FENCED,
    ]
    assert [one.forward for one in rulings] == [True, True, False, True, True, False]


def test_numbers_continue_in_the_next_session_so_what_it_sends_again_is_dropped() -> None:
    states = stamped()
    states.judge(at(0, 7, epoch=1))
    assert [states.passes(at(n, number, epoch=2)) for n, number in enumerate([6, 7, 8], start=1)] == [
        False,
        False,
        True,
    ]


def test_a_fenced_session_does_not_fence_a_producer_of_another_name() -> None:
    states = stamped()
    states.judge(at(0, 0, producer="p", epoch=5))
    assert states.passes(at(1, 0, producer="q", epoch=1))


def test_a_batch_counts_from_its_first_to_its_last_number() -> None:
    states = stamped()
    rulings = [
        states.judge(at(n, first, last=last, contiguous=True))
        for n, (first, last) in enumerate([(0, 4), (5, 5), (0, 4), (6, 9), (2, 3), (12, 14), (10, 11)])
    ]
    assert [one.verdict for one in rulings] == [
        Verdict.ACCEPTED,
        Verdict.ACCEPTED,
        Verdict.DUPLICATE,
        Verdict.ACCEPTED,
        Verdict.DUPLICATE,
        Verdict.GAP,
        Verdict.LATE,
    ]


@pytest.mark.parametrize("batch", [(4, 6), (0, 9), (5, 6)])
def test_a_batch_that_was_passed_on_in_part_can_neither_be_passed_on_nor_dropped_so_it_is_rejected(
    batch: tuple[int, int],
) -> None:
    states = stamped()
    states.judge(at(0, 0, last=5, contiguous=True))
    ruling = states.judge(at(1, batch[0], last=batch[1], contiguous=True))
    assert (ruling.verdict, ruling.reason) == (Verdict.REJECTED, Reason.OUT_OF_SEQUENCE)
    assert states.state(b"t:0").last_sequence_id("p") == 5


def test_a_batch_over_the_border_of_a_gap_is_rejected() -> None:
    states = stamped()
    for n, first in enumerate([0, 5, 9]):
        states.judge(at(n, first, contiguous=True))
    for batch in [(3, 5), (4, 6), (0, 1), (4, 8)]:
        assert states.judge(at(9, batch[0], last=batch[1], contiguous=True)).verdict is Verdict.REJECTED
    assert states.judge(at(9, 2, last=3, contiguous=True)).verdict is Verdict.LATE
    assert states.dump()[b"t:0"]["producers"]["p"]["missing"] == [[1, 1], [4, 4], [6, 8]]


def test_the_missing_ranges_that_are_remembered_are_bounded_and_older_numbers_are_unproven() -> None:
    states = stamped()
    contiguous(states, range(0, 4 * MISSING, 2))
    known = states.state(b"t:0").producers["p"]
    assert len(known.missing) == MISSING
    assert states.judge(at(999, 1, contiguous=True)).verdict is Verdict.BELOW_FLOOR
    assert states.judge(at(999, 4 * MISSING - 3, contiguous=True)).verdict is Verdict.LATE


def test_a_number_of_another_contiguous_run_than_the_known_one_is_unproven() -> None:
    states = stamped()
    states.judge(at(0, 100, contiguous=True))
    assert states.judge(at(1, 99, contiguous=True)).verdict is Verdict.BELOW_FLOOR


def test_what_is_held_is_bounded_and_when_it_is_full_all_of_it_is_passed_on_in_order() -> None:
    states = stamped(gaps=Gaps.HOLD, hold=3)
    rulings = contiguous(states, [0, 9, 5, 7, 6])
    assert [one.verdict for one in rulings[1:4]] == [Verdict.HELD] * 3
    assert (rulings[4].verdict, rulings[4].forward, rulings[4].released) == (Verdict.GAP, False, (2, 4, 3, 1))
    known = states.state(b"t:0").producers["p"]
    assert (known.highest, known.missing, known.held) == (9, [(1, 4), (8, 8)], [])


def test_a_copy_of_a_held_message_is_a_duplicate_and_the_message_itself_read_again_stays_held() -> None:
    states = stamped(gaps=Gaps.HOLD)
    contiguous(states, [0, 5])
    assert states.judge(at(1, 5, contiguous=True)).verdict is Verdict.HELD
    assert states.judge(at(2, 5, contiguous=True)).verdict is Verdict.DUPLICATE
    assert states.judge(at(3, 4, last=6, contiguous=True)).verdict is Verdict.REJECTED


def test_what_is_held_for_a_producer_is_released_when_the_producer_is_forgotten() -> None:
    states = stamped(gaps=Gaps.HOLD, limit=1)
    contiguous(states, [0, 5])
    assert states.judge(at(2, 0, producer="q")).released == (1,)
    assert list(states.state(b"t:0").producers) == ["q"]


def test_what_is_held_is_released_by_a_message_of_the_producer_that_is_not_contiguous() -> None:
    states = stamped(gaps=Gaps.HOLD)
    contiguous(states, [0, 5, 7])
    assert states.judge(at(3, 6)).released == (1, 2)
    assert states.state(b"t:0").last_sequence_id("p") == 7


def test_a_message_without_an_offset_cannot_be_held() -> None:
    states = stamped(gaps=Gaps.HOLD)
    contiguous(states, [0])
    assert states.judge(at(None, 5, contiguous=True)).verdict is Verdict.REJECTED


def test_a_producer_that_sent_nothing_for_the_expiry_is_forgotten_and_is_then_a_new_one() -> None:
    states = stamped()
    day = 24 * 3600 * 1000
    states.judge(at(0, 5, producer="p", time=0))
    states.judge(at(1, 5, producer="q", time=7 * day))
    assert list(states.state(b"t:0").producers) == ["p", "q"]
    states.judge(at(2, 6, producer="q", time=7 * day + 1))
    assert list(states.state(b"t:0").producers) == ["q"]
    assert states.judge(at(3, 5, producer="p", time=7 * day + 2)).verdict is Verdict.ACCEPTED  # the documented limit


def test_a_partition_remembers_a_bounded_number_of_producers_and_forgets_the_longest_silent_one() -> None:
    states = stamped(limit=2)
    for n, producer in enumerate("abac"):
        states.judge(at(n, n, producer=producer))
    assert list(states.state(b"t:0").producers) == ["a", "c"]


@pytest.mark.parametrize(
    "stamp",
    [
        "p#7",
        Stamp("", 1),
        Stamp("p", True),
        Stamp("p", 1.0),
        Stamp("p", 2**63),
        Stamp("p", 5, last=4),
        Stamp("p", 1, epoch=None),
    ],
)
def test_a_bad_stamp_is_rejected(stamp) -> None:
    ruling = stamped().judge(Arrival("t", 0, 0, b"k", stamp))
    assert (ruling.verdict, ruling.reason) == (Verdict.REJECTED, Reason.BAD_SEQUENCE)


def test_a_limit_below_one_is_refused() -> None:
    for setting in ("limit", "hold"):
        with pytest.raises(ValueError, match="at least 1"):
            ProducerFilter(**{setting: 0})

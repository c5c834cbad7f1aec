"""Retry topics whose hops the sender does not mark: named by the reader, they count as if it had marked them."""

import json
from collections import Counter
from typing import Any

import pytest

from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, RecordDecoder, Topic
from aggregations.errors import FlowError
from envelope import Envelope, EnvelopeError, Hop, Lineage, Node, Reason, Route, decode, encode
from envelope.dedup.retries import Retries
from envelope.hops import HopWriter
from envelope.redrive import Redrive, redrive_hops
from jobs.explaining.copies import Events, resend_of
from jobs.republish import InputRecord, InputTopics, Processor
from tests.support.both import TOPIC_ID, Both, redriven_record

RAW, AGAIN = {"raw": "raw-retry-*"}, Hop("raw", 0, 5, via="retrier", timestamp_ms=1)
PAYLOAD = Json({"cents": int})


def tried(*topics: str, index: int = 0) -> tuple[Hop, ...]:
    """The chain of output `index` that `till` made of raw:0:5 after it had gone through these retry topics."""
    names = ("raw", *topics)
    detours = [Hop(name, 0, 5 if name == "raw" else 1, via="retrier", timestamp_ms=1) for name in names[:-1]]
    last = Hop(names[-1], 0, 5 if len(names) == 1 else 2, via="till", index=index, timestamp_ms=1)
    return (*detours, last)


def made(offset: int, chain: tuple[Hop, ...], cents: int = 7, *, topic: str = "enriched") -> Record:
    return Record(
        topic, 0, offset, b"k", encode(Envelope(json.dumps({"cents": cents}).encode(), chain)), 1, (), TOPIC_ID
    )


def flow(*topics: str, retries: Any = None) -> Flow[Any]:
    first, *others = (Flow("f").source(Topic(name, PAYLOAD, retries=retries)) for name in topics or ("enriched",))
    whole = first.merge(*others) if others else first
    return whole.aggregate("a", "_key", Fields(n=count(), cents=total("cents")))


@pytest.mark.parametrize(
    "detour",
    [
        ("raw-retry-0",),
        ("raw-retry-0", "raw-retry-1"),
        ("raw-retry-0", "raw-retry-0"),
        ("raw-retry-0", "raw"),
        ("raw-retry-0", "raw", "raw-retry-0", "raw-retry-1"),
    ],
)
@pytest.mark.parametrize("retries", [RAW, {"raw": ["raw-retry-0", "raw-retry-1"]}])
def test_a_record_that_was_tried_again_stands_where_the_direct_one_does(detour: tuple[str, ...], retries: Any) -> None:
    own = Node("enriched", 0, 9)
    direct = Lineage.of(tried(index=2), own)
    chain = Retries.of(retries).marked(tried(*detour, index=2), "enriched")
    line = Lineage.of(chain, own).check()
    assert line.reduced() == direct
    assert (line.standing().lane, line.standing().position) == (direct.standing().lane, (5, 2))
    assert line.standing().route is Route.RETRIED


def test_a_record_in_a_retry_topic_stands_where_the_record_does_that_it_repeats() -> None:
    line = Lineage.of(Retries.of(RAW).marked((AGAIN,), "raw-retry-0"), Node("raw-retry-0", 0, 1))
    assert line.reduced() == Lineage((Node("raw", 0, 5),))


def test_siblings_that_were_put_into_a_retry_topic_without_a_hop_of_its_own_stay_two_messages() -> None:
    """The hop into the retry topic is then that of the republisher before: its index is part of the position."""
    twins = [
        (Hop("lines", 0, 3, via="split", index=index), Hop("raw-retry-0", 0, index, via="till", index=0))
        for index in (0, 1)
    ]
    marked = [Lineage.of(Retries.of(RAW).marked(one, "enriched"), Node("enriched", 0, 9)) for one in twins]
    assert [one.standing().position for one in marked] == [(3, 0, 0), (3, 1, 0)]


def test_a_record_without_a_chain_in_a_retry_topic_is_a_root_of_its_own_and_its_further_tries_are_recognised() -> None:
    chain = (Hop("raw-retry-0", 0, 1, via="retrier"), Hop("raw-retry-1", 0, 4, via="till", index=0))
    line = Lineage.of(Retries.of(RAW).marked(chain, "enriched"), Node("enriched", 0, 9))
    assert [str(node) for node in line.reduced().nodes] == ["raw-retry-0:0:1", "enriched:0:9"]


def test_a_topic_that_is_written_to_itself_stays_a_loop() -> None:
    chain = Retries.of(RAW).marked((Hop("raw", 0, 1), Hop("raw", 0, 2)), "enriched")
    with pytest.raises(EnvelopeError) as error:
        Lineage.of(chain, Node("enriched", 0, 9)).check()
    assert error.value.reason is Reason.CHAIN_LOOP


def test_what_was_sent_directly_and_through_retry_topics_is_counted_once() -> None:
    both = Both(flow(retries=RAW))
    both.process([made(0, tried()), made(1, tried("raw-retry-0")), made(2, tried(index=1))])
    both.process([made(3, tried("raw-retry-0", "raw-retry-0", index=1)), made(4, tried("raw-retry-0"))])
    assert both.results("a") == {b"k": {"n": 2, "cents": 14}}
    assert both.memory.report.verdicts["a"] == {"accepted": 2, "duplicate_in_batch": 1, "duplicate": 2}
    assert not both.dead_letters


def test_without_the_names_of_the_retry_topics_it_is_counted_twice() -> None:
    both = Both(flow())
    both.process([made(0, tried()), made(1, tried("raw-retry-0")), made(2, tried("raw-retry-0"))])
    assert both.results("a") == {b"k": {"n": 2, "cents": 14}}
    assert both.memory.report.verdicts["a"] == {"accepted": 1, "new_lane": 1, "ambiguous": 1}
    both.process([made(3, tried("raw-retry-0", "raw-retry-0"))])
    assert both.reasons() == [(3, Reason.CHAIN_LOOP)]


def test_a_flow_that_reads_a_topic_and_its_retry_topic_counts_each_event_once() -> None:
    both = Both(flow("raw", "raw-retry-0", retries=RAW))
    plain = [made(offset, (), topic="raw") for offset in (5, 6)]
    both.process([*plain, made(0, (AGAIN,), topic="raw-retry-0")])
    both.process([made(1, (AGAIN,), topic="raw-retry-0")])
    assert both.results("a") == {b"k": {"n": 2, "cents": 14}}


def test_a_retried_record_below_the_floor_is_unproven_and_never_dropped() -> None:
    both = Both(flow(retries=RAW))
    later = [made(n, (Hop("raw", 0, 10 + n, via="till", index=0, timestamp_ms=1),)) for n in range(40)]
    both.process(later)
    both.process([made(40, tried("raw-retry-0"))])
    assert both.reasons() == [(40, Reason.UNPROVEN)]
    assert both.results("a")[b"k"]["n"] == 40


def test_a_dead_letter_of_a_record_in_a_retry_topic_comes_back_once() -> None:
    """It was rejected where it was read, and not where the record was that it repeats."""
    broken = Record(
        "raw-retry-0",
        0,
        0,
        b"k",
        encode(Envelope(b"{", (Hop("raw", 0, 3, via="retrier", timestamp_ms=1),))),
        1,
        (),
        TOPIC_ID,
    )
    both = Both(flow("raw-retry-0", retries=RAW))
    both.process([broken])
    assert both.reasons() == [(0, Reason.BAD_PAYLOAD)]
    [dead] = both.dead_letters
    back = redriven_record(both.flow, dead, 7)
    chain = decode(back.value).chain
    for offset in (7, 8):
        fixed = encode(Envelope(b'{"cents": 7}', chain))
        both.process([Record("raw-retry-0", 0, offset, b"k", fixed, 1, (), TOPIC_ID)])
    assert both.results("a") == {b"k": {"n": 1, "cents": 7}}


def test_a_redriven_record_names_the_place_in_the_retry_topic_at_which_it_was_rejected() -> None:
    hops = redrive_hops(Hop("raw-retry-0", 2, 1), Hop("dead", 0, 3), Redrive("a", application="f"))
    line = Lineage.of(Retries.of(RAW).marked((AGAIN, *hops), "raw-retry-0"), Node("raw-retry-0", 2, 9))
    assert line.redriven is not None
    assert (line.redriven.place, line.redriven.offset) == ("!raw-retry-0:2#", 1)
    assert line.reduced().own == Node("raw", 0, 5)


def test_what_a_flow_publishes_and_shows_of_the_chain_says_that_it_was_tried_again() -> None:
    source = Topic("enriched", PAYLOAD, retries=RAW)
    both = Both(Flow("f").source(source).publish("out"))
    both.process([made(0, tried("raw-retry-0")), made(1, tried(index=1))])
    chains = [decode(one.value).chain for one in both.memory.outputs]
    assert [[hop.pass_through for hop in chain] for chain in chains] == [[True, False, False], [False, False]]


def test_a_retry_topic_is_blamed_for_what_went_through_it() -> None:
    events = Events(flow(retries=RAW), {})
    direct, again = (events.of(made(offset, chain)) for offset, chain in ((0, tried()), (1, tried("raw-retry-0"))))
    assert direct is not None
    assert again is not None
    assert direct.event == again.event
    resend = resend_of(direct.lineage, again.lineage)
    assert resend is not None
    assert (resend.via, resend.kind, resend.target) == ("retrier", "retry", "raw-retry-0")


def test_a_republisher_that_knows_the_retry_topics_finds_no_loop() -> None:
    twice = made(0, tried("raw-retry-0", "raw-retry-0"))
    given = InputRecord("enriched", 0, 0, b"k", twice.value, timestamp_ms=1)
    way = [
        Processor(lambda one: None, via="r", source=source, targets={"out": 1_000_000})
        for source in (InputTopics("enriched"), InputTopics("enriched", retries=RAW))
    ]
    with pytest.raises(EnvelopeError) as error:
        way[0].process(given, HopWriter("enriched", 0, "r"))
    assert error.value.reason is Reason.CHAIN_LOOP
    again = InputRecord("enriched", 0, 0, b"k", twice.value, timestamp_ms=1)
    assert way[1].process(again, HopWriter("enriched", 0, "r")) == []
    assert [hop.pass_through for hop in again.chain] == [True, True, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["raw-retry-0"], "names or patterns of retry topics by topic"),
        ({"raw": 1}, "names or patterns of retry topics by topic"),
        ({"raw": []}, "names or patterns of retry topics by topic"),
        ({"": "a"}, "names or patterns of retry topics by topic"),
        ({"raw": ["raw*"]}, "'raw\\*' is, or matches, the topic itself"),
        ({"raw": "retry", "legs": "retry"}, "'retry' and 'retry' can name one topic"),
        ({"raw": "a-*", "legs": ["x", "*-?b"]}, r"'a-\*' and '\*-\?b' can name one topic"),
    ],
)
def test_what_names_no_retry_topics_is_refused(given: Any, said: str) -> None:
    with pytest.raises(FlowError, match=said):
        Topic("enriched", PAYLOAD, retries=given)
    with pytest.raises(ValueError, match=said):
        InputTopics("enriched", retries=given)


def test_retry_topics_are_part_of_a_flows_identity_only_if_they_are_named() -> None:
    plain, named = Topic("enriched", PAYLOAD), Topic("enriched", PAYLOAD, retries=RAW)
    assert "retries" not in plain.definition
    assert plain == Topic("enriched", PAYLOAD, retries={})
    assert plain != named
    assert plain.definition != named.definition
    assert "retries of raw" in flow(retries=RAW).describe()


def test_a_decoded_record_has_the_marked_chain_also_where_its_payload_cannot_be_read() -> None:
    decoder = RecordDecoder(Topic("enriched", PAYLOAD, retries=RAW))
    with pytest.raises(EnvelopeError) as error:
        decoder.decode(Record("enriched", 0, 0, b"k", encode(Envelope(b"{", tried("raw-retry-0")))))
    assert error.value.chain is not None
    assert Counter(hop.pass_through for hop in error.value.chain) == {True: 1, False: 1}

"""Redriven records in a flow: folded exactly once, at the stage that rejected them."""

import json
import uuid
from dataclasses import replace
from typing import Any

import pytest

from aggregations.columns.batch import redriven as redriven_row
from aggregations.columns.decode import Decoder
from aggregations.definition.aggregates import count, total
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import END_OF_FLOW, Flow
from aggregations.definition.source import Json, RecordDecoder, Topic
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Envelope, EnvelopeError, Hop, Reason, Siblings, append_hop, decode, encode
from envelope.deadletter import DeadLetterHeaders, Form
from envelope.dedup.lineage import Redriven
from envelope.redrive import HEALED, Redrive, redrive_hops
from envelope.redrive_notes import Notes
from jobs.dead_letters import redrive as redriving
from jobs.dead_letters.letters import StoredDeadLetter
from jobs.dead_letters.redrive import redriven as redriven_value
from persistence.kafka import KafkaSettings
from tests.support.pure import table_of

LEGS = Topic("legs", Json({"tail": str, "carrier": str, "air": float}))
BROKEN = {"until": 0}


def parse(element):
    if element["carrier"] == "bad" and BROKEN["until"]:
        raise ValueError("not yet")
    return dict(element.value)


class Bad:
    """Counts; rejects the carrier `bad` as long as it is broken."""

    def zero(self) -> int:
        return 0

    def fold(self, state: int, element: Any) -> int:
        if element["carrier"] == "bad" and BROKEN["until"]:
            raise ValueError
        return state + 1


FLOW = (
    Flow("fleet")
    .source(LEGS)
    .aggregate("aircraft", "tail", Fields(legs=count()))
    .map(parse)
    .aggregate("carrier", "carrier", Fields(legs=count(), minutes=total("air")))
    .publish("out")
)


def leg(offset: int, carrier: str = "AA", air: object = 1.0) -> Record:
    payload = json.dumps({"tail": "N1", "carrier": carrier, "air": air}).encode()
    chain = (Hop("raw", 0, 100 + offset, via="wrap", index=0, topic_id="R"),)
    return Record("legs", 0, offset, b"N1", encode(Envelope(payload, chain=chain, key=b"N1")), topic_id="L")


def redriven(record: Record, offset: int, redrive: Redrive, letter: int = 0) -> Record:
    value = record.value
    died = Hop(record.topic, record.partition, record.offset, topic_id=record.topic_id)
    for hop in redrive_hops(died, Hop("dead", 0, letter), redrive):
        value = append_hop(value, hop)
    return Record("legs", 0, offset, record.key, value, topic_id="L")


def runner() -> MemoryRunner:
    return MemoryRunner(FLOW, bind(FLOW, {}, f"memory://{uuid.uuid4()}"), topic_ids={"legs": "L"})


def test_a_record_that_died_at_an_inner_stage_passes_the_stages_that_hold_it() -> None:
    BROKEN["until"] = 1
    run = runner()
    run.process([leg(0), leg(1, "bad"), *(leg(n) for n in range(2, 50))])
    [letter] = run.dead_letters
    assert (letter.stage, letter.hole, letter.reason) == ("carrier", False, "transform_failed")
    BROKEN["until"] = 0
    back = [
        redriven(letter.record, offset, Redrive("carrier", hole=False, application="fleet"), offset)
        for offset in (50, 51)
    ]
    report = run.process(back)
    assert report.verdicts["carrier"] == {"redriven": 1, "duplicate_in_batch": 1}
    assert report.verdicts["aircraft"] == {}
    assert run.process([redriven(letter.record, 52, Redrive("carrier", hole=False, application="fleet"))]).verdicts[
        "carrier"
    ] == {"duplicate": 1}
    assert run.results("aircraft") == {b"N1": {"legs": 50}}
    assert run.results("carrier") == {b"AA": {"legs": 49, "minutes": 49.0}, b"bad": {"legs": 1, "minutes": 1.0}}


def test_a_record_with_a_hole_is_folded_below_the_floor_once_it_is_mended() -> None:
    run = runner()
    run.process([leg(0), leg(1, air=float("nan"))] + [leg(n) for n in range(2, 50)])
    [letter] = run.dead_letters
    assert letter.reason == "bad_payload" or letter.reason == "not_finite"
    # JSON has no NaN, so it was rejected before all stages and left no hole.
    mended = leg(1)
    assert run.process([redriven(mended, 50, Redrive(letter.stage, letter.hole))]).verdicts["aircraft"] == {
        "redriven": 1
    }
    assert run.results("carrier") == {b"AA": {"legs": 50, "minutes": 50.0}}


def test_a_record_bound_for_the_end_of_the_flow_is_only_published_and_only_if_it_is_missing_there() -> None:
    refusing = {"now": True}

    def value(element):
        if refusing["now"] and element["carrier"] == "bad":
            raise ValueError
        return b"{}"

    flow = Flow("fleet").source(LEGS).aggregate("carrier", "carrier", Fields(legs=count())).publish("out", value=value)
    run = MemoryRunner(flow, bind(flow, {}, f"memory://{uuid.uuid4()}"), topic_ids={"legs": "L"})
    run.process([leg(0), leg(1, "bad"), leg(2)])
    [letter] = run.dead_letters
    assert (letter.stage, letter.hole, len(run.outputs)) == (END_OF_FLOW, False, 2)
    refusing["now"] = False
    bound = Redrive(END_OF_FLOW, hole=False, application="fleet")
    run.process([redriven(letter.record, 3, bound)])
    assert len(run.outputs) == 3
    assert decode(run.outputs[-1].value).chain[-2].via == HEALED
    report = run.process([redriven(letter.record, 4, bound), redriven(leg(0), 5, bound)])
    assert report.verdicts[END_OF_FLOW] == {"copy": 2}
    assert len(run.outputs) == 3
    assert run.results("carrier") == {b"AA": {"legs": 2}, b"bad": {"legs": 1}}


def test_columns_know_where_a_redriven_record_stands() -> None:
    records = [
        redriven(leg(3), 9, Redrive("carrier", hole=False, application="fleet")),
        leg(4),
        redriven(leg(5), 10, Redrive()),
        redriven(redriven(leg(6), 11, Redrive()), 12, Redrive("carrier", hole=False, application="fleet")),
    ]
    table = table_of(records)
    batch = Decoder(LEGS, {"legs": "L"}).decode(table)
    one_by_one = RecordDecoder(LEGS)
    for rekeyed in (False, True):
        for row, record in enumerate(records):
            lineage = one_by_one.decode(record).lineage
            assert batch.standing(row, rekeyed=rekeyed) == lineage.standing(rekeyed=rekeyed)
            assert redriven_row(batch.frame.row(row, named=True), batch.signatures) == lineage.redriven


def test_a_redriven_record_of_a_topic_without_envelopes_keeps_its_place() -> None:
    topic = Topic("plain", Json({"tail": str}), envelope=False)
    body = b'{"tail":"N1"}'
    value = redriven_value(
        b"N1", body, (), DeadLetterHeaders("plain", 0, 7, Reason.NULL_KEY, hole=True), Hop("dead", 0, 1)
    )
    records = [Record("plain", 0, 90, b"N1", value), Record("plain", 0, 91, b"N1", body)]
    one_by_one = [RecordDecoder(topic).decode(record) for record in records]
    assert [one.columns for one in one_by_one] == [{"tail": "N1"}] * 2
    assert one_by_one[0].lineage.standing().position == (7,)
    assert one_by_one[0].lineage.redriven == Redriven(Redrive(), "!plain:0#", 7)
    batch = Decoder(topic).decode(table_of(records))
    assert [batch.standing(row, rekeyed=False) for row in (0, 1)] == [one.lineage.standing() for one in one_by_one]


def test_letters_that_are_trimmed_damaged_or_empty_do_not_go_back_as_they_are() -> None:
    letter, place = DeadLetterHeaders("plain", 0, 7, Reason.MALFORMED), Hop("dead", 0, 1)
    damaged = leg(1).value[:-9] + b"x" + leg(1).value[-8:]
    for value, headers in ((damaged, ()), (b"{", [("hw-dlq-trimmed", b"value")]), (None, ()), (b"", ())):
        with pytest.raises(EnvelopeError):
            redriven_value(b"k", value, headers, letter, place)
    with pytest.raises(EnvelopeError, match="chain cannot be read"):
        redriven_value(b"k", damaged, (), letter, place, lambda key, value: b'{"tail":"N1"}')
    bare = replace(letter, form=Form.PAYLOAD)
    mended = redriven_value(b"k", damaged, (), bare, place, lambda key, value: b'{"tail":"N1"}')
    assert decode(mended).payload == b'{"tail":"N1"}'


def test_why_a_function_that_mends_failed_is_logged_with_its_line_and_without_its_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    facts = DeadLetterHeaders("plain", 0, 7, Reason.BAD_PAYLOAD)

    class Stored(list[Any]):
        total = 3
        notes = Notes()

    def mend(key: bytes | None, value: bytes | None) -> bytes:
        if value == b"text":
            return "text"
        raise LookupError("the customer's number is 4711")

    def of_one(value: bytes) -> bytes:
        return value

    stored = [
        StoredDeadLetter(Hop("dead", 0, offset), None, value, (), facts)
        for offset, value in enumerate([b"{", b"text", b"}"])
    ]
    monkeypatch.setattr(redriving, "Letters", lambda *_: Stored(stored))
    monkeypatch.setattr(redriving, "Topics", lambda *_: None)
    done = redriving.redrive(KafkaSettings("k:1"), "dead", mend=mend)
    assert done.unusable == {"transform_failed": 3}
    line = mend.__code__.co_firstlineno + 3
    assert [record.getMessage() for record in caplog.records] == [
        f"dead letters not mended: 2: the function of --mend raised LookupError at test_redrive.py:{line} in mend",
        "dead letters not mended: 1: the function of --mend returned str instead of bytes",
    ]
    caplog.clear()
    redriving.redrive(KafkaSettings("k:1"), "dead", mend=of_one)  # type: ignore[arg-type]
    [record] = caplog.records
    assert record.getMessage() == "dead letters not mended: 3: the function of --mend raised TypeError"


def test_a_mended_payload_keeps_the_chain_of_its_letter() -> None:
    letter, place = DeadLetterHeaders("legs", 0, 1, Reason.BAD_PAYLOAD, form=Form.ENVELOPE), Hop("dead", 0, 1)
    old = decode(leg(1).value)
    for mended in (b'{"tail":"N2"}', encode(Envelope(b'{"tail":"N2"}'))):
        new = decode(redriven_value(b"N1", leg(1).value, (), letter, place, lambda key, _, mended=mended: mended))
        assert new.payload == b'{"tail":"N2"}'
        assert new.chain[: len(old.chain)] == old.chain
    chain = (Hop("other", 3, 4),)
    own = encode(Envelope(b"{}", chain))
    assert decode(redriven_value(b"N1", leg(1).value, (), letter, place, lambda *_: own)).chain[:1] == chain


def test_a_letter_that_dies_each_time_can_go_back_for_ever_and_stands_where_it_died_first() -> None:
    first, last, envelope, plain = leg(1).value, leg(1).value, (), ()
    for n in range(40):
        facts = DeadLetterHeaders(
            "legs", 0, 1 + n, Reason.FOLD_FAILED, hole=True, application="fleet", form=Form.ENVELOPE
        )
        first = redriven_value(b"N1", first, (), facts, Hop("dead", 0, n))
        last = redriven_value(b"N1", last, (), facts, Hop("dead", 0, n), lambda *_: b'{"tail":"N1"}')
        envelope, plain = decode(first).chain, decode(last).chain
    died = Hop("legs", 0, 1)
    back = redrive_hops(died, Hop("dead", 0, 39), Redrive(application="fleet"))
    assert envelope == plain == (*decode(leg(1).value).chain, *back)


def test_a_letter_that_waited_in_a_retry_topic_since_it_was_redriven_keeps_all_of_its_hops() -> None:
    back = redrive_hops(Hop("legs", 0, 1), Hop("dead", 0, 0), Redrive(application="fleet"))
    chain = (Hop("raw", 0, 5, via="kit"), *back, Hop("legs", 0, 7, via="fleet", pass_through=True))
    facts = DeadLetterHeaders("legs.retry", 0, 3, Reason.TRANSFORM_FAILED, application="fleet", form=Form.ENVELOPE)
    value = redriven_value(b"N1", encode(Envelope(b"{}", chain)), (), facts, Hop("dead", 0, 1))
    again = redrive_hops(Hop("legs.retry", 0, 3), Hop("dead", 0, 1), Redrive(hole=facts.hole, application="fleet"))
    assert decode(value).chain == (*chain, *again)


def unless_broken(element: Any) -> Any:
    if BROKEN["until"]:
        raise ValueError
    return element.value


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_item_that_comes_late_is_not_taken_for_its_siblings_that_died_further_on(order: tuple[int, int]) -> None:
    flow = (
        Flow("fleet")
        .source(Topic("legs", Json({"carrier": str}), envelope=False))
        .flat_map(lambda element: [{"carrier": one} for one in element["carrier"].split("+")])
        .divert(lambda element: bool(BROKEN["until"]) and element["carrier"] == "A")
        .aggregate("first", lambda element: element["carrier"], Bad())
        .map(unless_broken)
        .aggregate("second", lambda element: element["carrier"], Bad())
    )
    BROKEN["until"] = 1
    run = MemoryRunner(flow, bind(flow, {}, f"memory://{uuid.uuid4()}"), topic_ids={"legs": "L"})
    run.process([Record("legs", 0, 0, b"N1", b'{"carrier": "A+B+C"}', topic_id="L")])
    BROKEN["until"] = 0
    letters = run.dead_letters[:]
    assert [(one.stage, one.items) for one in letters] == [("first", ((0,),)), ("second", ())]
    for offset, n in enumerate((*order, *order), start=1):
        one = letters[n]
        facts = DeadLetterHeaders(
            "legs", 0, 0, one.reason, "L", stage=one.stage, application="fleet", form=Form.PAYLOAD
        )
        value = redriven_value(b"N1", one.record.value, (), facts, Hop("dead", 0, n))
        run.process([Record("legs", 0, offset, b"N1", value, topic_id="L")])
    assert run.results("first") == run.results("second") == {b"A": 1, b"B": 1, b"C": 1}
    assert run.run.ledger.listed == {}


def test_of_a_group_of_siblings_one_that_died_cannot_be_told_from_one_that_was_folded() -> None:
    topic = Topic("legs", Json({"carrier": str}), siblings=Siblings.GROUP)
    flow = Flow("fleet").source(topic).aggregate("all", lambda _: "all", Bad())
    BROKEN["until"] = 1
    run = MemoryRunner(flow, bind(flow, {}, f"memory://{uuid.uuid4()}"), topic_ids={"legs": "L"})
    chain = (Hop("raw", 0, 5, via="foreign", topic_id="R"),)
    values = [encode(Envelope(b'{"carrier": "%b"}' % one, chain)) for one in (b"bad", b"AA")]
    run.process([Record("legs", 0, n, b"N1", value, topic_id="L") for n, value in enumerate(values)])
    assert [one.reason for one in run.dead_letters] == [Reason.FOLD_FAILED]
    assert run.states("all")[b"all"].histories.holes == {}
    BROKEN["until"] = 0
    facts = DeadLetterHeaders("legs", 0, 0, Reason.FOLD_FAILED, "L", hole=True, application="fleet", form=Form.ENVELOPE)
    back = redriven_value(b"N1", values[0], (), facts, Hop("dead", 0, 0))
    assert run.process([Record("legs", 0, 2, b"N1", back, topic_id="L")]).verdicts == {"all": {"ambiguous": 1}}


def test_under_another_key_a_mended_record_finds_no_hole() -> None:
    BROKEN["until"] = 1
    flow = Flow("fleet").source(LEGS).aggregate("carrier", "carrier", Bad())
    run = MemoryRunner(flow, bind(flow, {}, f"memory://{uuid.uuid4()}"), topic_ids={"legs": "L"})
    run.process([leg(0, "bad")])
    [letter] = run.dead_letters
    BROKEN["until"] = 0
    facts = DeadLetterHeaders(
        "legs", 0, 0, letter.reason, "L", hole=letter.hole, application="fleet", form=Form.ENVELOPE
    )
    for offset, carrier, verdict in ((1, "AA", "copy"), (2, "bad", "redriven")):
        mended = json.dumps({"tail": "N1", "carrier": carrier, "air": 1.0}).encode()
        value = redriven_value(
            b"N1", letter.record.value, (), facts, Hop("dead", 0, 0), lambda *_, mended=mended: mended
        )
        back = Record("legs", 0, offset, b"N1", value, topic_id="L")
        assert run.process([back]).verdicts["carrier"] == {verdict: 1}
    assert run.results("carrier") == {b"bad": 1}


def test_a_payload_that_reads_as_an_envelope_is_what_the_letter_says_it_is() -> None:
    place, value = Hop("dead", 0, 1), encode(Envelope(b"inner"))[:-6].replace(bytes.fromhex("1001"), b"", 1)
    assert decode(value).payload == b"inner"
    facts = DeadLetterHeaders("pay", 0, 7, Reason.FOLD_FAILED)
    assert decode(redriven_value(b"k", value, (), replace(facts, form=Form.PAYLOAD), place)).payload == value
    assert decode(redriven_value(b"k", value, (), replace(facts, form=Form.ENVELOPE), place)).payload == b"inner"
    with pytest.raises(EnvelopeError, match="do not say whether it is one"):
        redriven_value(b"k", value, (), facts, place)
    assert decode(redriven_value(b"k", encode(Envelope(b"sealed")), (), facts, place)).payload == b"sealed"


def test_a_letter_that_is_no_envelope_goes_back_only_when_it_is_mended() -> None:
    letter, place = DeadLetterHeaders("legs", 0, 7, Reason.NOT_AN_ENVELOPE), Hop("dead", 0, 1)
    with pytest.raises(EnvelopeError, match="mend it") as caught:
        redriven_value(b"k", b'{"tail":"N1"}', (), letter, place)
    assert caught.value.reason is Reason.NOT_AN_ENVELOPE
    for mended in (b'{"tail":"N1"}', encode(Envelope(b'{"tail":"N1"}'))):
        value = redriven_value(b"k", b"?", (), letter, place, lambda key, _, mended=mended: mended)
        assert decode(value).payload == b'{"tail":"N1"}'
        assert [hop.pass_through for hop in decode(value).chain] == [True, True]


def test_a_letter_that_cannot_be_mended_is_named_by_its_reason_and_does_not_end_the_others() -> None:
    letter, place = DeadLetterHeaders("plain", 0, 7, Reason.MALFORMED), Hop("dead", 0, 1)

    def raises(key: bytes | None, value: bytes | None) -> bytes:
        raise ValueError(f"what is {value!r}?")

    def forgets(key: bytes | None, value: bytes | None) -> bytes:
        return None  # type: ignore[return-value]

    for mend, what in ((raises, "ValueError"), (forgets, "NoneType")):
        with pytest.raises(EnvelopeError, match=what) as caught:
            redriven_value(b"k", b"payload", (), letter, place, mend)
        assert caught.value.reason is Reason.TRANSFORM_FAILED
        assert "payload" not in str(caught.value)

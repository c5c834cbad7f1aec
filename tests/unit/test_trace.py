"""Whether a chain is true, decided from what the topics contain."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from envelope import Envelope, Hop, encode
from envelope.redrive import HEALED, Redrive, redrive_hops
from jobs.environment import UsageError
from jobs.tracing import Fetched, Found, Place, traced
from tests.support.cli import run as headwater

RAW = Hop("raw", 0, 7, via="wrap", index=0, count=2, timestamp_ms=100, topic_id="R1")
LEGS = Hop("legs", 1, 4, via="rekey", index=0, count=1, rekeyed=True, timestamp_ms=200)

Topics = dict[str, Fetched]


def record(value: bytes, key: bytes = b"N1", timestamp_ms: int = 300, topic_id: str = "") -> Fetched:
    return Fetched(Found.FOUND, key, value, timestamp_ms, topic_id)


def message(*chain: Hop, event_id: str = "e1") -> bytes:
    return encode(Envelope(b"{}", chain, event_id=event_id))


def topics(**changed: Fetched) -> Topics:
    """A raw record, wrapped into legs, re-keyed into carriers."""
    return {
        "raw:0:7": record(b"raw", timestamp_ms=100, topic_id="R1"),
        "legs:1:4": record(message(RAW), timestamp_ms=200),
        "carriers:0:9": record(message(RAW, LEGS), b"UA"),
    } | {name.replace("_", ":"): one for name, one in changed.items()}


def read(found: Topics) -> Callable[[Place], Fetched]:
    return lambda place: found.get(str(place), Fetched(Found.BEYOND))


def wrong(found: Topics) -> dict[str, tuple[str, ...]]:
    """What is wrong, by place."""
    steps = traced(Place("carriers", 0, 9), read(found))
    return {str(step.place): step.wrong for step in steps if step.wrong}


def test_a_true_chain_is_read_from_the_root_to_the_record() -> None:
    steps = traced(Place("carriers", 0, 9), read(topics()))
    assert [(str(step.place), step.found, step.wrong) for step in steps] == [
        ("raw:0:7", Found.FOUND, ()),
        ("legs:1:4", Found.FOUND, ()),
        ("carriers:0:9", Found.FOUND, ()),
    ]
    assert [step.key for step in steps] == [b"N1", b"N1", b"UA"]
    assert [step.event_id for step in steps] == ["", "e1", "e1"]
    assert [step.hop and step.hop.via for step in steps] == ["wrap", "rekey", None]


def test_a_hop_that_does_not_say_how_many_outputs_there_are_shows_the_number_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    legs = record(message(RAW, replace(LEGS, count=None)), b"UA")
    monkeypatch.setattr("jobs.tracing.trace", lambda _, place: traced(place, read(topics(carriers_0_9=legs))))
    assert headwater(monkeypatch, "trace", "--bootstrap", "127.0.0.1:1", "carriers:0:9") == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[2:]] == ["2", "0", "e1"]


def test_a_hop_that_a_flow_has_marked_as_one_through_a_retry_topic_contradicts_nothing() -> None:
    marked = record(message(replace(RAW, pass_through=True), LEGS), b"UA")
    assert wrong(topics(carriers_0_9=marked)) == {}
    unmarked = topics(legs_1_4=record(message(replace(RAW, pass_through=True)), timestamp_ms=200))
    assert wrong(unmarked) == {"legs:1:4": ("its own chain is not the beginning of this chain",)}


def test_a_record_without_an_envelope_is_its_own_root() -> None:
    [step] = traced(Place("raw", 0, 7), read(topics()))
    assert (step.hop, step.wrong) == (None, ())


@pytest.mark.parametrize("found", [Found.EXPIRED, Found.MISSING, Found.GONE])
def test_what_cannot_be_read_any_more_contradicts_nothing(found: Found) -> None:
    assert wrong(topics(raw_0_7=Fetched(found))) == {}
    assert wrong(topics(legs_1_4=Fetched(found))) == {}


def test_a_record_of_another_topic_of_the_same_name_is_not_compared() -> None:
    later = record(message(LEGS), b"x", 999, topic_id="R2")
    assert wrong(topics(raw_0_7=later)) == {}
    assert traced(Place("carriers", 0, 9), read(topics(raw_0_7=later)))[0].found is Found.GONE


def test_a_record_that_was_written_at_an_offset_which_is_used_again_is_said_to_be_another_one() -> None:
    hop = replace(RAW, leader_epoch=3)
    legs, carriers = record(message(hop), timestamp_ms=200), record(message(hop, LEGS), b"UA")
    for epoch, said in (
        (3, {}),
        (None, {}),
        (4, {"raw:0:7": ("the broker lost the record of this hop, and gave its offset to another one",)}),
    ):
        raw = replace(record(b"raw", timestamp_ms=100, topic_id="R1"), leader_epoch=epoch)
        assert wrong(topics(raw_0_7=raw, legs_1_4=legs, carriers_0_9=carriers)) == said


def test_a_record_of_another_cluster_is_not_looked_for() -> None:
    west = replace(RAW, cluster="west")
    found = topics(legs_1_4=record(message(west), timestamp_ms=200), carriers_0_9=record(message(west, LEGS), b"UA"))
    del found["raw:0:7"]
    assert wrong(found) == {}


@pytest.mark.parametrize(
    ("changed", "place", "why"),
    [
        ({"raw_0_7": Fetched(Found.BEYOND)}, "raw:0:7", "the log ends below this offset"),
        ({"raw_0_7": record(b"raw", timestamp_ms=101)}, "raw:0:7", "it has another timestamp than the hop says"),
        (
            {"raw_0_7": record(b"raw", b"N2", 100)},
            "raw:0:7",
            "the key of the output differs, and the hop does not say so",
        ),
        (
            {"raw_0_7": record(message(LEGS), timestamp_ms=100)},
            *("raw:0:7", "its own chain is not the beginning of this chain"),
        ),
        (
            {"legs_1_4": record(b"raw", timestamp_ms=200)},
            "legs:1:4",
            "its own chain is not the beginning of this chain",
        ),
        (
            {"legs_1_4": record(message(replace(RAW, offset=8)), timestamp_ms=200)},
            *("legs:1:4", "its own chain is not the beginning of this chain"),
        ),
        ({"carriers_0_9": record(message(RAW, replace(LEGS, index=1)), b"UA")}, "legs:1:4", "output 1 of 1"),
    ],
)
def test_a_record_that_contradicts_the_chain_is_named(changed: Topics, place: str, why: str) -> None:
    assert wrong(topics(**changed)) == {place: (why,)}


def test_a_redriven_record_has_the_chain_of_the_dead_letter_and_two_more_hops() -> None:
    hops = redrive_hops(Hop("carriers", 0, 9), Hop("dead", 0, 3), Redrive(application="fleet"))
    found = topics(
        dead_0_3=record(message(RAW, LEGS), b"UA"),
        carriers_0_12=record(message(RAW, LEGS, *hops), b"UA"),
    )
    steps = traced(Place("carriers", 0, 12), read(found))
    assert [(str(step.place), step.wrong) for step in steps] == [
        *(("raw:0:7", ()), ("legs:1:4", ()), ("carriers:0:9", ())),
        *(("dead:0:3", ()), ("carriers:0:12", ())),
    ]


def test_a_healed_record_is_named_twice_and_is_true() -> None:
    healed = replace(RAW, via=HEALED, pass_through=True)
    found = topics(
        legs_1_4=record(message(healed, RAW), timestamp_ms=200),
        carriers_0_9=record(message(healed, RAW, LEGS), b"UA"),
    )
    assert wrong(found) == {}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Found.EXPIRED, "retention has deleted the record"),
        (Found.GONE, "there is no such topic"),
        (Found.BEYOND, "no record has this offset yet"),
        (Found.MISSING, "the log has no record at this offset: it was compacted"),
    ],
)
def test_a_record_that_cannot_be_read_cannot_be_traced(found: Found, why: str) -> None:
    with pytest.raises(UsageError, match=f"^carriers:0:9: {why}"):
        traced(Place("carriers", 0, 9), read(topics(carriers_0_9=Fetched(found))))

"""Ranges of topics, what is counted in them, and its picture."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from jobs.environment import UsageError
from jobs.explaining.blame import Blame, Passage, Resent
from jobs.explaining.log import Span
from jobs.explaining.plot import SLOTS, svg
from jobs.explaining.ranges import spans_of
from jobs.tracing import Place
from tests.support.topics import InMemory

FLOW = Flow("fleet").source(Topic("legs", Json({"k": str})), Topic("trips", Json({"k": str})))


@pytest.fixture
def world(tmp_path: Path) -> InMemory:
    """Two partitions of ten legs, a second apart, and three trips; the first two legs of partition 1 are deleted."""
    made = InMemory(FLOW.aggregate("first", "k", Fields(n=count())), tmp_path)
    for n in range(10):
        for partition in (0, 1):
            made.send(b"K", b"{}", topic="legs", partition=partition, timestamp_ms=n * 1000)
    for n in range(3):
        made.send(b"K", b"{}", topic="trips", timestamp_ms=n * 1000)
    made.low["legs", 1] = 2
    return made


def spans(world: InMemory, *texts: str) -> list[Span]:
    return spans_of(texts, ["legs", "trips"], world)


def test_without_a_range_everything_that_the_topics_have_is_read(world: InMemory) -> None:
    assert spans(world) == [Span("legs", 0, 0, 10), Span("legs", 1, 2, 10), Span("trips", 0, 0, 3)]


def test_a_topic_a_partition_and_offsets_are_ranges(world: InMemory) -> None:
    assert spans(world, "trips") == [Span("trips", 0, 0, 3)]
    assert spans(world, "legs:1") == [Span("legs", 1, 2, 10)]
    assert spans(world, "legs:0:3-5") == [Span("legs", 0, 3, 6)]


def test_ranges_that_meet_are_read_once(world: InMemory) -> None:
    assert spans(world, "legs:0:3-5", "legs:0:6-8", "legs:0:4-7") == [Span("legs", 0, 3, 9)]


def test_times_are_ranges_of_every_topic(world: InMemory) -> None:
    assert spans(world, "1970-01-01T00:00:01Z/1970-01-01T00:00:03Z") == [
        Span("legs", 0, 1, 3),
        Span("legs", 1, 1, 3),
        Span("trips", 0, 1, 3),
    ]
    assert spans(world, "1970-01-01T00:00:08Z/")[0] == Span("legs", 0, 8, 10)
    assert spans(world, "/1970-01-01T01:00:01+01:00")[0] == Span("legs", 0, 0, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raw", "the flow reads legs, trips"),
        ("legs:2", "legs has partitions 0 to 1"),
        ("legs:x", "legs has partitions 0 to 1"),
        ("legs:0:3", "write TOPIC"),
        ("legs:0:3-", "write TOPIC"),
        ("legs:0:3-4:5", "write TOPIC"),
        ("legs:0:5-3", "reversed; write legs:0:3-5"),
        ("legs:0:10-12", "legs:0 ends before offset 10"),
        ("yesterday/", "not a time"),
        ("1970-01-01T00:00:03Z/1970-01-01T00:00:01Z", "reversed; write 1970-01-01T00:00:01Z/"),
    ],
)
def test_an_invalid_range_says_what_to_write(world: InMemory, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        spans(world, text)
    assert str(refused.value).startswith("--range")


def blamed(*times: int) -> Blame:
    hop = Resent(Passage("wrap <1>", "raw", "legs", "republisher"), records=10)
    for at in times:
        hop.add(Place("legs", 0, at), at, again=False)
    quiet = Resent(Passage("quiet", "raw", "legs", "republisher"), records=10)
    return Blame((), [hop, quiet], 20, len(times), first_ms=0, last_ms=1_000)


def test_the_re_sends_are_drawn() -> None:
    drawn = svg(blamed(0, 5, 1_000))
    root = ET.fromstring(drawn)
    bars = [one for one in root.iter() if one.get("class") == "republisher"]
    assert [float(bar.get("x", "")) for bar in bars] == [20.0, 20.0 + (SLOTS - 1) * 8]
    assert float(bars[0].get("height", "")) == 2 * float(bars[1].get("height", ""))
    texts = [one.text for one in root.iter() if one.text]
    assert "wrap <1>: raw to legs" in texts
    assert not any("quiet" in text for text in texts)


def test_a_range_without_re_sends_or_records_is_drawn_too() -> None:
    for one in (blamed(), Blame(())):
        ET.fromstring(svg(one))

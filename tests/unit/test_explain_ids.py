"""Records are found by the event ids that the filters of a flow extract, wherever these are."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from aggregations.definition.aggregates import count
from aggregations.definition.element import Record
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from aggregations.errors import RunRefusedError
from envelope import Envelope, encode
from envelope.filters import (
    EventIdFilter,
    SequenceFilter,
    deduplicate,
    deduplicate_by_key,
    from_envelope,
    from_header,
    from_value,
)
from jobs import explain, kafka
from jobs.environment import NotThereError
from jobs.explaining import find
from jobs.explaining.find import find_records
from jobs.explaining.identities import as_text
from jobs.tracing import Place
from tests.support.topics import InMemory

PAYLOAD = Json({"id": str, "number": int})
DAY = timedelta(days=1)


def number(element: Any) -> tuple[str, int]:
    return element["id"], element["number"]


def flow(*filters: Any, envelope: bool = False) -> Flow[Any]:
    made: Flow[Any] = Flow("shop").source(Topic("orders", PAYLOAD, envelope=envelope))
    for place, one in enumerate(filters):
        made = made.deduplicate(one, name=f"filter{place}")
    return made.aggregate("key", "_key", Fields(n=count()))


def stocked(made: Flow[Any], *records: tuple[str, int, str]) -> InMemory:
    """Records with a payload, and a header; every second one in a partition of its own."""
    world = InMemory(made)
    for at, (text, count_, header) in enumerate(records):
        place = world.send(b"k", json.dumps({"id": text, "number": count_}).encode(), partition=at % 2)
        old = world.topics["orders"][place.partition][place.offset]
        assert old is not None
        headers = (("ce_id", b"stale"), ("ce_id", header.encode())) if header else ()
        new = Record("orders", place.partition, place.offset, b"k", old.value, 0, headers, old.topic_id)
        world.topics["orders"][place.partition][place.offset] = new
    return world


RECORDS = [("a", 1, "h1"), ("b", 2, "h2"), ("a", 3, "h1"), ("c", 4, ""), ("d", 1, "h3")]


@pytest.mark.parametrize(
    ("rule", "wanted", "offsets"),
    [
        (EventIdFilter(from_header("ce_id"), DAY), "h1", [0, 2]),
        (EventIdFilter(from_header("ce_id"), DAY), "stale", []),
        (EventIdFilter(from_value("id"), DAY), "a", [0, 2]),
        (EventIdFilter(from_value("number"), DAY), "1", [0, 4]),
        (EventIdFilter(number, DAY), "a,3", [2]),
        (EventIdFilter(from_header("ce_id"), DAY, partitions=2), "h3", [4]),
        (deduplicate(from_header("ce_id"), DAY), "h2", [1]),
        (deduplicate_by_key(DAY), "h2", []),
        (SequenceFilter(from_value("number")), "1", []),
    ],
)
@pytest.mark.parametrize("part", [1, 2, 1_000])
def test_an_id_is_found_where_the_filter_extracts_it(
    rule: Any, wanted: str, offsets: list[int], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "_PART", part)
    made = flow(rule)
    world = stocked(made, *RECORDS)
    assert find_records(made, wanted, world) == sorted((Place("orders", at % 2, at // 2) for at in offsets), key=str)


def test_the_search_is_bounded_by_the_range_and_says_how_far_it_is() -> None:
    made = flow(EventIdFilter(from_header("ce_id"), DAY))
    world, seen = stocked(made, *RECORDS), list[tuple[int, int]]()
    found = find_records(made, "h1", world, ["orders:0:1-2"], lambda *at: seen.append(at))
    assert found == [Place("orders", 0, 1)]
    assert seen == [(2, 2)]


def test_each_filter_s_id_and_the_envelope_s_are_searched() -> None:
    made = flow(EventIdFilter(from_header("ce_id"), DAY), EventIdFilter(from_value("id"), DAY))
    world = stocked(made, *RECORDS)
    assert find_records(made, "b", world) == find_records(made, "h2", world) == [Place("orders", 1, 0)]
    enveloped = flow(EventIdFilter(from_value("id"), DAY), envelope=True)
    world = InMemory(enveloped)
    body = json.dumps({"id": "inner", "number": 1}).encode()
    place = world.send(b"k", encode(Envelope(body, key=b"k", event_id="outer")))
    world.send(b"k", b"damaged")
    assert find_records(enveloped, "inner", world) == find_records(enveloped, "outer", world) == [place]
    by_envelope = flow(EventIdFilter(from_envelope("event_id"), DAY), envelope=True)
    assert find_records(by_envelope, "outer", world) == [place]


def test_records_from_which_nothing_can_be_extracted_do_not_end_the_search() -> None:
    made = flow(EventIdFilter(number, DAY))
    world = stocked(made, ("a", 1, ""))
    world.send(b"k", b"{")
    world.send(b"k", None)
    world.send(b"k", b'{"id": "a", "number": 2}')
    assert find_records(made, "a,2", world) == [Place("orders", 0, 3)]


def test_bytes_and_tuples_are_ids_as_text() -> None:
    assert as_text((b"a", 1, ("b", "c"))) == "a,1,b,c"


def test_a_flow_with_a_lookup_is_refused_with_the_commands_that_help(tmp_path: Path) -> None:
    table = Topic("prices", Json({"price": int}), envelope=False)
    made = flow().lookup("price", table, "id").aggregate("prices", "price", Fields(n=count()), co_partitioned=False)
    with pytest.raises(RunRefusedError, match=r"lookup\(\): which row .* inspect shows the states, trace the records"):
        explain(made, Place("orders", 0, 0), kafka=kafka("nowhere:1"), stores={})


def test_an_unknown_range_is_not_there() -> None:
    made = flow(EventIdFilter(from_header("ce_id"), DAY))
    with pytest.raises(NotThereError, match="the flow reads orders"):
        find_records(made, "h1", stocked(made, *RECORDS), ["trips"])

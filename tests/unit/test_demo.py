"""The demo without servers: its republisher's and its flow's real code, with everything sent twice, against the truth."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pytest

from aggregations.definition.element import Record
from aggregations.run.binding import bind
from aggregations.run.memory import MemoryRunner
from envelope import Reason
from jobs.demo import audit, flights, nonsense
from jobs.demo.flow import LEGS, flow
from persistence.kafka import Message
from tests.support.legs import batches, records, republished


@pytest.fixture(scope="module")
def table() -> pl.DataFrame:
    return flights.load(1500)


@pytest.fixture
def runner() -> Iterator[MemoryRunner]:
    running = MemoryRunner(flow, bind(flow, {}, f"memory://demo-{random.random()}"))
    yield running
    running.close()


def named(states: dict[bytes, Any]) -> dict[str, Any]:
    return {key.decode(): state for key, state in states.items()}


def test_every_aircraft_and_carrier_is_exact_although_a_part_is_sent_again(
    table: pl.DataFrame, runner: MemoryRunner
) -> None:
    once = republished(flights.messages(table))
    sent = [*once[:1200], *once[700:]]  # a crash after 1200 messages, 700 of them committed
    for batch in batches(records(sent), 97):
        runner.process(batch)
    truth = {"aircraft": "tailnum", "carrier": "carrier"}
    for stage, by in truth.items():
        assert not audit.differences(flights.expected(table, by), named(runner.results(stage)), stage)
    assert runner.report.verdicts["aircraft"]["duplicate"] == 500 - sum(
        message.get("key") is None for message in once[700:1200]
    )


def test_a_flight_without_a_tail_number_goes_to_the_dead_letters_and_counts_nowhere(runner: MemoryRunner) -> None:
    nobodys = flights.load(5000).filter(pl.col("tailnum").is_null())
    assert nobodys.height > 0
    runner.process(records(republished(flights.messages(nobodys))))
    assert [letter.reason for letter in runner.dead_letters] == [Reason.NULL_KEY] * nobodys.height
    assert runner.results("carrier") == {}


def test_the_republisher_refuses_its_nonsense_for_the_reasons_foretold() -> None:
    refused: Counter[str] = Counter()
    bad = nonsense.in_raw()
    assert republished([Message(key=one.key, value=one.value) for one in bad], refused) == []
    assert refused == Counter(one.reason.value for one in bad)


@pytest.mark.parametrize("one", nonsense.in_legs(), ids=lambda one: one.reason.value)
def test_the_flow_refuses_each_nonsense_for_the_reason_foretold(one: nonsense.Nonsense, runner: MemoryRunner) -> None:
    runner.process([Record(LEGS, 0, 0, one.key, one.value)])
    [letter] = runner.dead_letters
    assert (letter.reason, letter.record.value) == (one.reason, one.value)
    assert runner.results("aircraft") == runner.results("carrier") == {}


@pytest.mark.parametrize("place", [nonsense.in_raw, nonsense.in_legs])
def test_no_two_pieces_of_nonsense_with_one_value_have_two_reasons(
    place: Callable[[], list[nonsense.Nonsense]],
) -> None:
    assert len({one.value for one in place()}) == len({(one.value, one.reason) for one in place()})


def test_the_truth_is_that_of_the_table(table: pl.DataFrame) -> None:
    carriers = flights.expected(table, "carrier")
    kept = table.filter(pl.col("tailnum").is_not_null())
    assert sum(one["legs"] for one in carriers.values()) == kept["dep_time"].count()
    assert sum(one["cancelled"] for one in carriers.values()) == kept["dep_time"].null_count()
    assert sum(one["air_minutes"] for one in carriers.values()) == kept["air_time"].sum()
    assert max(one["worst_delay"] for one in carriers.values()) == kept["arr_delay"].max()


def test_the_whole_year_is_there() -> None:
    year = flights.load(flights.ALL)
    assert (year.height, year["tailnum"].n_unique(), year["dep_time"].null_count()) == (336_776, 4044, 8255)


def test_a_state_that_differs_is_named_with_its_field_and_both_values() -> None:
    right = dict.fromkeys(flights.FIELDS, 1)
    found = {"same": right, "differs": {**right, "legs": 2}, "invented": right}
    assert audit.differences({"same": right, "differs": right, "lost": right}, found, "aircraft") == [
        "aircraft invented: not in the table of flights",
        "aircraft differs: legs 2 for 1",
        "aircraft lost: missing",
    ]


def test_a_dead_letter_that_is_missing_invented_or_changed_is_named() -> None:
    due = {("t", 0, 1): ("empty", b""), ("t", 0, 2): ("empty", b""), ("t", 0, 3): ("empty", b"")}
    found = {("t", 0, 1): ("empty", b""), ("t", 0, 3): ("empty", b"changed"), ("t", 9, 9): ("diverted", b"")}
    assert audit.unaccounted(due, found) == [
        "dead letter t:0:2: expected empty, found none",
        "dead letter t:0:3: expected empty, found empty with other bytes",
        "dead letter t:9:9: expected none, found diverted",
    ]

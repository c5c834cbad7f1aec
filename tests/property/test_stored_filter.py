"""Filters with their states in a store: crashes at every step, other batch borders, and what was published in the end."""

import json
import random
from datetime import timedelta
from typing import Any, NoReturn

import pytest

from envelope import TopicPartition
from envelope.filters import (
    Arrival,
    EventIdFilter,
    FilterStates,
    Gaps,
    ProducerFilter,
    SequenceFilter,
    SessionWindows,
    Stamp,
    TimeWindows,
    deduplicate,
    deduplicate_by_key,
    distinct,
)
from persistence import Conflict, Fenced, Reader, StoredFilter, StoreError, Terminal
from persistence.commit import faults
from persistence.commit.faults import Fault, FaultOutcome, Injector
from tests.support.pure import fresh_store

POINTS = ["fetch", "load", "ledger", "publish", "persist", "manifest"]
TEN = timedelta(milliseconds=10)

FILTERS = {
    "sequence": SequenceFilter(lambda one: one.value["n"]),
    "interval": deduplicate_by_key(TEN),
    "interval over partitions": deduplicate(lambda one: one.value["id"], TEN, partitions=2),
    "event id": EventIdFilter(lambda one: one.value["id"], TEN, limit=3),
    "tumbling": distinct(TimeWindows(TEN, TEN)),
    "session": distinct(SessionWindows(timedelta(milliseconds=2), TEN)),
    "producer": ProducerFilter(lambda one: one.value["stamp"]),
    "producer, held": ProducerFilter(lambda one: one.value["stamp"], gaps=Gaps.HOLD, hold=3),
}


class Crash(Exception):
    pass


def crash() -> NoReturn:
    raise Crash


def topic(seed: int, partitions: int = 2) -> list[list[Arrival]]:
    draw = random.Random(seed)
    logs: list[list[Arrival]] = [[] for _ in range(partitions)]
    sent = [[0] for _ in range(partitions)]
    for n in range(30):
        place = draw.randrange(partitions)
        number = draw.choice([*sent[place][-3:], sent[place][-1] + 1, sent[place][-1] + 2])
        sent[place].append(max(number, sent[place][-1]))
        value = {"n": number, "id": f"e{draw.randrange(12)}", "stamp": Stamp("p", number, contiguous=True)}
        key = draw.choice([b"a", b"b", None])
        logs[place].append(Arrival("t", place, len(logs[place]), key, value, max(0, n - draw.randrange(12))))
    return logs


def run(
    rule: Any, logs: list[list[Arrival]], store: str, seed: int, injected: list[Fault]
) -> tuple[list[Arrival], int]:
    """Everything that was published, in order, with a new object after every crash; and the number of crashes.

    Partitions are read in a fixed order in each round, in batches of random sizes.
    """
    draw, published, crashes = random.Random(seed), [], 0
    with faults.use(Injector(injected, crash)):
        while True:
            try:
                stored = StoredFilter(rule, store)
                offsets = {place: stored.start.get(TopicPartition("t", place), 0) for place in range(len(logs))}
                while any(offsets[place] < len(log) for place, log in enumerate(logs)):
                    batch, begun = [], stored.unfinished
                    for place, log in enumerate(logs):
                        end = offsets[place] + draw.randrange(1, 5)
                        if begun:
                            end = begun.get(TopicPartition("t", place), offsets[place])
                        batch += log[offsets[place] : end]
                        offsets[place] = end
                    stored.process(batch, lambda made: published.extend(record for record, _ in made.passed))
                return published, crashes
            except (Crash, StoreError):
                crashes += 1


def drawn_faults(draw: random.Random) -> list[Fault]:
    return [Fault(draw.choice(POINTS), draw.choice(list(FaultOutcome)), draw.randrange(1, 6)) for _ in range(3)]


def one_partition(records: list[Arrival], place: int) -> list[int]:
    """Offsets in the order in which they were published, each once."""
    return list(dict.fromkeys(one.offset for one in records if one.partition == place))


@pytest.mark.parametrize("name", FILTERS)
def test_crashes_anywhere_and_other_batches_change_neither_what_is_published_nor_the_states(name: str) -> None:
    rule = FILTERS[name]
    partitions = 1 if name == "interval over partitions" else 2  # its states depend on the order between partitions
    crashes = 0
    for seed in range(40):
        logs = topic(seed, partitions)
        plain = FilterStates(rule)
        held: dict[tuple[int, int], Arrival] = {}
        expected: list[Arrival] = []
        for record in (record for log in logs for record in log):
            ruling = plain.judge(record)
            held[record.partition, record.offset] = record
            expected += [record] * ruling.forward + [held[record.partition, offset] for offset in ruling.released]
        store = fresh_store()
        published, crashed = run(rule, logs, store, seed, drawn_faults(random.Random(seed)))
        crashes += crashed
        for place in range(partitions):
            assert one_partition(published, place) == one_partition(expected, place)
        after = StoredFilter(rule, store)
        for scope, value in plain.dump().items():
            assert rule.dump(after.state(scope)) == value
    assert crashes > 40


@pytest.mark.parametrize("name", FILTERS)
def test_without_a_crash_everything_is_published_exactly_once(name: str) -> None:
    for seed in range(20):
        published, _ = run(FILTERS[name], topic(seed), fresh_store(), seed, [])
        places = [(one.partition, one.offset) for one in published]
        assert len(places) == len(set(places))


def test_states_written_before_the_outputs_would_lose_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted order: a crash between the two steps."""

    def wrong(publish, stages, manifests):
        for _, persist in stages:
            faults.effect("persist", persist)
        faults.effect("publish", publish)
        for _, save in manifests:
            save()

    rule, logs = FILTERS["sequence"], topic(1)
    expected, _ = run(rule, logs, fresh_store(), 1, [])
    monkeypatch.setattr("persistence.stored_filter.commit", wrong)
    published, _ = run(rule, logs, fresh_store(), 1, [Fault("persist", FaultOutcome.AFTER, 2)])
    assert {(one.partition, one.offset) for one in published} < {(one.partition, one.offset) for one in expected}


OVER_PARTITIONS = {
    "interval": deduplicate(lambda one: one.value["id"], timedelta(days=1), partitions=2),
    "event id": EventIdFilter(lambda one: one.value["id"], timedelta(days=1), partitions=2),
}


@pytest.mark.parametrize("name", OVER_PARTITIONS)
def test_over_all_partitions_one_of_each_id_is_published_whatever_crashes(name: str) -> None:
    crashes = 0
    for seed in range(60):
        logs = topic(seed, 3)
        published, crashed = run(OVER_PARTITIONS[name], logs, fresh_store(), seed, drawn_faults(random.Random(seed)))
        places = {(one.partition, one.offset): one.value["id"] for one in published}
        assert sorted(places.values()) == sorted({one.value["id"] for log in logs for one in log}), seed
        crashes += crashed
    assert crashes > 60


def test_an_unfinished_batch_is_repeated_before_other_records() -> None:
    rule, store = OVER_PARTITIONS["event id"], fresh_store()
    batch = [Arrival("t", place, 0, b"k", {"id": "a"}) for place in (1, 0)]
    with pytest.raises(Crash):
        StoredFilter(rule, store).process(batch, lambda made: crash())
    again = StoredFilter(rule, store)
    assert again.unfinished == {("t", 0): 1, ("t", 1): 1}
    with pytest.raises(ValueError, match="Pass its records alone first: t:0 up to 1, t:1 up to 1"):
        again.process(batch[:1], lambda made: None)
    made = again.process(batch, lambda made: None)
    assert [one.partition for one, _ in made.passed] == [0]
    assert not again.unfinished
    assert not StoredFilter(rule, store).unfinished


def records(*numbers: int, start: int = 0, partition: int = 0) -> list[Arrival]:
    return [Arrival("t", partition, offset, b"k", {"n": n}) for offset, n in enumerate(numbers, start=start)]


@pytest.fixture(params=["memory", "sqlite", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path) -> str:
    return fresh_store() if request.param == "memory" else f"{request.param}://{tmp_path}/states"


def test_a_filter_continues_after_a_restart_in_any_store(url: str) -> None:
    rule = FILTERS["sequence"]
    first = StoredFilter(rule, url)
    first.process(records(1, 2, 3), lambda made: None)
    first.close()
    second = StoredFilter(rule, url)
    assert second.start == {("t", 0): 3}
    made = second.process(records(2, 3, 4, start=3), lambda made: None)
    assert [one.offset for one, _ in made.passed] == [5]
    assert second.state(b"t:0").seen == 4
    second.close()


def test_the_older_of_two_filters_of_a_name_is_fenced(url: str) -> None:
    old = StoredFilter(FILTERS["sequence"], url)
    old.process(records(1, 2), lambda made: None)
    new = StoredFilter(FILTERS["sequence"], url)
    with pytest.raises(Fenced):
        old.process(records(3, start=2), lambda made: None)
    assert new.process(records(3, start=2), lambda made: None).verdicts == {"accepted": 1}
    new.close()
    old.close()


def test_a_state_that_somebody_else_wrote_is_a_conflict() -> None:
    store = fresh_store()
    stored = StoredFilter(FILTERS["sequence"], store)
    stored.process(records(1), lambda made: None)
    values = stored._kept
    values.save(values.load([b"t:0"]))
    with pytest.raises(Conflict):
        stored.process(records(2, start=1), lambda made: None)
    assert stored.process(records(2, start=1), lambda made: None).verdicts == {"accepted": 1}


def test_a_state_of_another_filter_is_refused() -> None:
    store = fresh_store()
    StoredFilter(FILTERS["sequence"], store).process(records(1), lambda made: None)
    other = deduplicate_by_key(TEN, name="sequence")
    with pytest.raises(Terminal, match="kind SequenceFilter, not IntervalFilter"):
        StoredFilter(other, store).process(records(1, start=1), lambda made: None)


def test_the_offsets_of_a_partition_ascend() -> None:
    stored = StoredFilter(FILTERS["sequence"], fresh_store())
    with pytest.raises(ValueError, match="offset 0 comes after 1"):
        stored.process(records(1, 2)[::-1], lambda made: None)


def test_a_state_in_a_store_is_one_readable_value_with_its_positions() -> None:
    stored = StoredFilter(FILTERS["sequence"], fresh_store())
    stored.process(records(1, 2, start=17), lambda made: None)
    [(key, found)] = stored._kept.store.scan(stored._kept.stage)
    value = json.loads(found.value)
    assert key == b"t:0"
    assert {name: one for name, one in value.items() if name != "crc32c"} == {
        "schema": 1,
        "kind": "SequenceFilter",
        "positions": {"t": {"0": 19}},
        "value": {"seen": 2},
    }


def test_dead_letters_and_warnings_are_given_to_publish() -> None:
    made = StoredFilter(SequenceFilter(lambda one: one.value), fresh_store()).process(
        [Arrival("t", 0, n, b"%d" % n, value) for n, value in enumerate([*range(20), "x"])], lambda made: None
    )
    [(record, ruling)] = made.rejected
    assert (record.offset, ruling.reason) == (20, "bad_sequence")
    assert len(made.warnings) == 1
    assert made.verdicts == {"accepted": 20, "rejected": 1}


def test_a_topic_that_was_created_again_is_refused_before_its_records_are_taken_for_copies(url: str) -> None:
    def of(topic_id: str, offset: int) -> list[Arrival]:
        return [Arrival("t", 0, offset, b"k", {"n": 1}, topic_id=topic_id)]

    for make in (lambda: StoredFilter(FILTERS["sequence"], url), lambda: Reader(url, "reader", 0)):
        kept = make()
        kept.process(of("first", 0), lambda *_: 0)
        kept.close()
        kept = make()
        kept.process(of("", 1), lambda *_: 0)  # an unknown id is compared with nothing
        for offset in (0, 2):
            with pytest.raises(Terminal, match="created again"):
                kept.process(of("second", offset), lambda *_: 0)
        kept.process(of("first", 2), lambda *_: 0)
        kept.close()


def test_a_batch_of_records_that_the_state_covers_is_not_written_again() -> None:
    store = fresh_store()
    stored = StoredFilter(FILTERS["sequence"], store)
    stored.process(records(1, 2), lambda made: None)
    again = StoredFilter(FILTERS["sequence"], store)
    assert again.process(records(1, 2), lambda made: None).verdicts == {"duplicate": 2}
    assert again._kept.load([b"t:0"])[b"t:0"].version == 1

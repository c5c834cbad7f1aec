"""Reading ranges of offsets from a broker: every record of a range once, whatever was fetched ahead."""

import random
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from aggregations.engine import fetch
from aggregations.engine.consuming import Pointers
from aggregations.engine.fetch import Fetcher
from aggregations.engine.message_objects import HEADERS, Objects
from aggregations.engine.ranges import Range
from persistence.kafka import BrokerRefused, BrokerUnavailable, KafkaSettings, Topics, librdkafka
from persistence.kafka.errors import BrokerError
from tests.support.raw_headers import Names, produce_raw

PARTITIONS = 3


@pytest.fixture
def filled(settings: KafkaSettings, topic: Callable[..., str]) -> str:
    """A topic with 400, 300 and 0 records; the value is partition and offset."""
    name = topic(partitions=PARTITIONS, name="filled")
    producer = Producer({"bootstrap.servers": settings.bootstrap})
    for partition, count in enumerate((400, 300, 0)):
        for offset in range(count):
            producer.produce(
                name,
                f"{partition}:{offset}".encode(),
                b"k%d" % offset,
                partition,
                headers=[("n", b"%d" % offset), ("z", None)],
            )
    producer.flush(30)
    return name


KINDS = {"pointers": Pointers, "objects": Objects}


@pytest.fixture(params=KINDS)
def fetcher(
    request: pytest.FixtureRequest, settings: KafkaSettings, filled: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fetcher]:
    """A fetcher that reads librdkafka's messages itself, and one that gets confluent-kafka's objects."""
    if request.param == "objects":
        monkeypatch.setattr(librdkafka, "is_known", lambda: False)
    made = Fetcher(settings, filled, "test-fetch")
    assert isinstance(made._client, KINDS[request.param])
    yield made
    made.close()


def read(fetcher: Fetcher, *ranges: Range, stays: bool = True) -> dict[int, list[int]]:
    """Offsets by partition, as they came."""
    found: dict[int, list[int]] = {}
    for table in fetcher.read(ranges, stays=stays):
        for partition, offset, value in zip(
            *(table.column(name).to_pylist() for name in ("partition", "offset", "value")), strict=True
        ):
            assert value == f"{partition}:{offset}".encode()
            found.setdefault(partition, []).append(offset)
    return found


def offsets(*ranges: Range) -> dict[int, list[int]]:
    return {one.partition: list(range(one.start, one.end)) for one in ranges if one.start < one.end}


def test_a_table_has_all_that_a_record_consists_of(fetcher: Fetcher, filled: str) -> None:
    [table] = fetcher.read([Range(0, 7, 9)], stays=True)
    assert table.column("topic").to_pylist() == [filled, filled]
    assert table.column("key").to_pylist() == [b"k7", b"k8"]
    assert table.column("value").to_pylist() == [b"0:7", b"0:8"]
    assert table.schema.field("timestamp").type == pa.timestamp("ms")
    assert all(one.year > 2020 for one in table.column("timestamp").to_pylist())


@pytest.mark.parametrize("kind", KINDS)
def test_headers_are_read_for_those_who_ask(
    kind: str, settings: KafkaSettings, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of them, with and without values, also where messages are taken a few bytes at a time."""
    if kind == "objects":
        monkeypatch.setattr(librdkafka, "is_known", lambda: False)
    producer = Producer({"bootstrap.servers": settings.bootstrap})
    some: list[list[tuple[str, bytes | None]]] = [
        [],
        [("a", b"1")],
        [("a", b""), ("a", None), ("größe", b"\x00\xff" * 40)],
        [("n" * 300, None)],
        [],
        [("", b"v"), *((f"h{number}", b"%d" % number) for number in range(100))],
    ]
    for one in some * 3:
        producer.produce(filled, b"v", b"k", 2, headers=list(one))
    producer.flush(30)
    for most_bytes in (1, 150, 1 << 20):
        fetcher = Fetcher(settings, filled, "test-fetch", headers=True)
        try:
            if isinstance(fetcher._client, Pointers):
                fetcher._client._most_bytes = most_bytes
            tables = [*fetcher.read([Range(0, 7, 9), Range(2, 0, 18)], stays=True)]
        finally:
            fetcher.close()
        whole = pa.concat_tables(tables)
        whole.validate(full=True)
        assert whole.schema.field("headers").type == HEADERS
        rows = zip(*(whole.column(name).to_pylist() for name in ("partition", "offset", "headers")), strict=True)
        found = {place[:2]: [(one["key"], one["value"]) for one in place[2]] for place in rows}
        assert found == {(0, offset): [("n", b"%d" % offset), ("z", None)] for offset in (7, 8)} | {
            (2, offset): some[offset % len(some)] for offset in range(18)
        }


@pytest.mark.parametrize("compiled", [True, False])
def test_a_header_whose_name_is_not_utf_8_has_another_name(
    settings: KafkaSettings, filled: str, compiled: bool
) -> None:
    names: list[Names] = [[(b"a", b"1"), (b"a\xff", b"2"), (b"b", None)], [], [(b"\xff", None), (b"", b"")]]
    produce_raw(settings.bootstrap, filled, [(b"k", b"v", some) for some in names * 20], 2)
    fetcher = Fetcher(settings, filled, "test-fetch", headers=True, compiled=compiled)
    [table] = fetcher.read([Range(2, 0, 60)], stays=False)
    fetcher.close()
    found = [[(one["key"], one["value"]) for one in its] for its in table.column("headers").to_pylist()]
    assert found == [[("a", b"1"), ("\ufffd", b"2"), ("b", None)], [], [("\ufffd", None), ("", b"")]] * 20


def test_null_and_empty_keys_and_values_are_told_apart(fetcher: Fetcher, settings: KafkaSettings, filled: str) -> None:
    producer = Producer({"bootstrap.servers": settings.bootstrap})
    records = [(None, None), (b"", b""), (b"k", None), (None, b"v"), (b"k", b"v")]
    for place, (key, value) in enumerate(records):
        producer.produce(filled, value, key, 2, timestamp=1_000 + place)
    producer.flush(30)
    [table] = fetcher.read([Range(2, 0, 5)], stays=True)
    columns = [table.column(name).to_pylist() for name in ("key", "value")]
    assert list(zip(*columns, strict=True)) == records
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == list(range(1_000, 1_005))
    assert table.column("offset").to_pylist() == list(range(5))


@pytest.mark.parametrize("seed", range(8))
def test_every_record_of_every_range_comes_once_and_in_order(
    fetcher: Fetcher, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges that go on where the last ones ended, or begin again, or leave a partition out, of very unequal size."""
    rng = random.Random(seed)
    monkeypatch.setattr(fetch, "CHUNK_RECORDS", rng.choice([1, 7, 50, 50_000]))
    monkeypatch.setattr(fetch, "AHEAD_BYTES", rng.choice([1, 500, 128 << 20]))
    if isinstance(fetcher._client, Pointers):
        fetcher._client._most_bytes = rng.choice([1, 30, 500, 1 << 20])
    at = {0: 0, 1: 0}
    sizes = {0: 400, 1: 300}
    for _ in range(12):
        ranges = []
        for partition in rng.sample([0, 1], rng.choice([1, 2, 2])):
            if rng.random() < 0.25:
                at[partition] = rng.randrange(sizes[partition])  # an attempt is repeated, or another run took over
            end = min(at[partition] + rng.choice([0, 1, 5, 60, 150]), sizes[partition])
            ranges.append(Range(partition, at[partition], end))
            at[partition] = end
        stays = rng.random() < 0.8
        assert read(fetcher, *ranges, stays=stays) == offsets(*ranges), f"seed {seed}, {ranges}"


def test_what_is_read_only_in_part_is_read_from_its_start_the_next_time(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the client has taken beyond that part, and whether it had read these partitions before."""
    if isinstance(fetcher._client, Pointers):
        fetcher._client._most_bytes = 1
    for start in (0, 100):
        ranges = (Range(0, start, start + 100), Range(1, start, start + 100))
        with monkeypatch.context() as small:
            small.setattr(fetch, "CHUNK_BYTES", 1)
            for table in fetcher.read(ranges, stays=True):
                assert 0 < table.num_rows < 200
                break
        assert read(fetcher, *ranges) == offsets(*ranges)
    assert read(fetcher, Range(0, 200, 220)) == offsets(Range(0, 200, 220))


def test_records_that_are_produced_later_follow(fetcher: Fetcher, settings: KafkaSettings, filled: str) -> None:
    assert read(fetcher, Range(0, 390, 400)) == offsets(Range(0, 390, 400))
    producer = Producer({"bootstrap.servers": settings.bootstrap})
    for partition, offset in ((0, 400), (0, 401), (2, 0)):
        producer.produce(filled, f"{partition}:{offset}".encode(), partition=partition)
    producer.flush(30)
    ranges = (Range(0, 400, 402), Range(2, 0, 1))
    assert read(fetcher, *ranges) == offsets(*ranges)


def test_a_range_that_ends_with_markers_or_holds_nothing_else_is_done(
    fetcher: Fetcher, settings: KafkaSettings, topics: Topics, filled: str
) -> None:
    producer = Producer({"bootstrap.servers": settings.bootstrap, "transactional.id": filled})
    producer.init_transactions(30)
    places = []
    for commit in (True, False, False, True):
        start = topics.marks([filled])[filled, 2].high
        producer.begin_transaction()
        producer.produce(filled, f"2:{start}".encode(), partition=2)
        producer.flush(30)
        producer.commit_transaction(30) if commit else producer.abort_transaction(30)
        deadline = time.monotonic() + 30
        while (end := topics.marks([filled])[filled, 2].high) < start + 2:  # the marker is written behind the answer
            assert time.monotonic() < deadline
        places.append(Range(2, start, end))
    assert [one.end - one.start for one in places] == [2, 2, 2, 2], "a record and its marker"
    assert [read(fetcher, one) for one in places] == [{2: [0]}, {}, {}, {2: [6]}]
    assert read(fetcher, Range(2, 1, 6)) == {}, "markers and what was aborted"
    assert read(fetcher, Range(2, 0, 8)) == {2: [0, 6]}


def test_the_end_of_a_log_that_was_fetched_ahead_with_the_records_before_it_is_not_forgotten(
    fetcher: Fetcher, settings: KafkaSettings, topics: Topics, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of the client then returns a transaction's records and, before or after them, the end of the log."""
    monkeypatch.setattr(fetch, "_SILENCE_SECONDS", 5.0)
    producer = Producer({"bootstrap.servers": settings.bootstrap, "transactional.id": filled})
    producer.init_transactions(30)
    assert read(fetcher, Range(2, 0, 0)) == {}
    for start in (0, 11, 22):
        producer.begin_transaction()
        for offset in range(start, start + 10):
            producer.produce(filled, f"2:{offset}".encode(), partition=2)
        producer.commit_transaction(30)
        deadline = time.monotonic() + 30
        while topics.marks([filled])[filled, 2].high < start + 11:
            assert time.monotonic() < deadline
        time.sleep(0.5)  # the client fetches ahead
        assert read(fetcher, Range(2, start, start + 11)) == {2: list(range(start, start + 10))}


def test_a_partition_that_is_not_asked_for_may_have_lost_what_was_to_be_read_of_it(
    fetcher: Fetcher, settings: KafkaSettings, filled: str
) -> None:
    assert read(fetcher, Range(0, 0, 10), Range(1, 0, 10)) == offsets(Range(0, 0, 10), Range(1, 0, 10))
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    for deleted in admin.delete_records([TopicPartition(filled, 1, 200)]).values():
        deleted.result(30)
    assert read(fetcher, Range(0, 50, 400)) == offsets(Range(0, 50, 400))
    assert read(fetcher, Range(0, 300, 400), Range(1, 250, 300)) == offsets(Range(0, 300, 400), Range(1, 250, 300))


def test_records_that_were_deleted_are_an_error_and_not_left_out(
    fetcher: Fetcher, settings: KafkaSettings, filled: str
) -> None:
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    for deleted in admin.delete_records([TopicPartition(filled, 0, 20)]).values():
        deleted.result(30)
    with pytest.raises(BrokerUnavailable, match=f"reading {filled}:0: .*deleted in the meantime"):
        read(fetcher, Range(0, 10, 30))
    assert read(fetcher, Range(0, 20, 30)) == offsets(Range(0, 20, 30))


@pytest.mark.parametrize("headers", [False, True])
def test_a_setting_that_the_client_does_not_know_is_refused(settings: KafkaSettings, headers: bool) -> None:
    wrong = settings.with_options(no_such_setting="1")
    with pytest.raises(BrokerRefused, match=r'setting up the consumer of legs: .*"no.such.setting"'):
        Fetcher(wrong, "legs", "test-fetch", headers=headers)


@pytest.mark.parametrize("headers", [False, True])
def test_a_topic_that_is_not_there_is_an_error(
    settings: KafkaSettings, headers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_SILENCE_SECONDS", 3.0)
    fetcher = Fetcher(settings, "no-such-topic", "test-fetch", headers=headers)
    try:
        with pytest.raises(BrokerError, match="no-such-topic"):
            read(fetcher, Range(0, 0, 1))
    finally:
        fetcher.close()

"""How a range is looked for among records that are fetched ahead, with a client that keeps them in a list."""

from collections.abc import Collection, Mapping
from pathlib import Path

import pyarrow as pa
import pytest

from aggregations.engine import clients, fetch
from aggregations.engine.fetch import Fetcher
from aggregations.engine.message_objects import HEADERS, Event
from aggregations.engine.ranges import Range
from persistence.kafka import BrokerUnavailable, KafkaSettings
from persistence.protocol import FlowRef


class Listed:
    """A client that delivers records in a given order, a number of them at a time, with `size` bytes of headers."""

    def __init__(self, *runs: tuple[int, int, int], at_once: int = 1 << 30, size: int = 0) -> None:
        self._at_once, self._headers = at_once, [{"key": "h", "value": b"x" * size}]
        self.records = [(partition, offset) for partition, first, end in runs for offset in range(first, end)]
        self.asked: list[int] = []
        self.paused: list[set[int]] = []
        self.resumed: list[set[int]] = []
        self.closed = False

    def take(self, most: int, seconds: float) -> tuple[pa.RecordBatch, list[Event]]:
        self.asked.append(most)
        most = min(most, self._at_once)
        taken, self.records = self.records[:most], self.records[most:]
        nothing = pa.nulls(len(taken), pa.binary())
        columns = {
            "key": nothing,
            "value": nothing,
            "partition": pa.array([partition for partition, _ in taken], pa.int32()),
            "offset": pa.array([offset for _, offset in taken], pa.int64()),
            "timestamp": pa.nulls(len(taken), pa.timestamp("ms")),
            "headers": pa.array([self._headers] * len(taken), HEADERS),
        }
        return pa.RecordBatch.from_pydict(columns), []

    def assign(self, topic: str, starts: Mapping[int, int]) -> None:
        pass

    def unassign(self) -> None:
        pass

    def pause(self, topic: str, partitions: Collection[int]) -> None:
        self.records = [one for one in self.records if one[0] not in partitions]
        self.paused.append(set(partitions))

    def resume(self, topic: str, partitions: Collection[int]) -> None:
        self.resumed.append(set(partitions))

    def close(self) -> None:
        self.closed = True


def test_the_last_records_of_a_range_are_found_behind_many_of_another_in_few_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Listed((0, 0, 100), (1, 0, 99), (0, 100, 20_000), (1, 99, 100))
    monkeypatch.setattr(fetch, "_client", lambda settings, headers: client)
    fetcher = Fetcher(KafkaSettings("nowhere:1"), "legs", "g")
    found = list(fetcher.read([Range(0, 0, 100), Range(1, 0, 100)], stays=True))
    assert sum(table.num_rows for table in found) == 200
    assert len(client.asked) < 30
    [ahead] = fetcher.read([Range(0, 100, 20_000)], stays=True)
    assert ahead["offset"].to_pylist() == list(range(100, 20_000))


@pytest.mark.parametrize(("most", "paused"), [(fetch.AHEAD_BYTES, []), (1_000_000, [{0}])])
def test_a_partition_pauses_when_many_bytes_of_it_are_ahead_and_not_before(
    monkeypatch: pytest.MonkeyPatch, most: int, paused: list[set[int]]
) -> None:
    """Paused, it loses what was fetched of it."""
    client = Listed((0, 0, 120_000), (1, 0, 10), at_once=1000)
    monkeypatch.setattr(fetch, "AHEAD_BYTES", most)
    monkeypatch.setattr(fetch, "_client", lambda settings, headers: client)
    fetcher = Fetcher(KafkaSettings("nowhere:1"), "legs", "g")
    found = list(fetcher.read([Range(0, 0, 100), Range(1, 0, 10)], stays=True))
    assert sum(table.num_rows for table in found) == 110
    assert client.paused == paused
    client.records += [(0, offset) for offset in range(60_000, 120_000) if paused]  # fetched again
    ahead = [offset for table in fetcher.read([Range(0, 100, 120_000)], stays=True) for offset in table["offset"]]
    assert (len(ahead) == 119_900) == (not paused)
    assert client.resumed == paused


class Endless(Listed):
    """A client that always has more of each partition that is assigned and not paused: 500 records at a time."""

    def take(self, most: int, seconds: float) -> tuple[pa.RecordBatch, list[Event]]:
        for partition in set(self._at) - self._stopped:
            first, self._at[partition] = self._at[partition], self._at[partition] + min(500, most)
            self.records += [(partition, offset) for offset in range(first, self._at[partition])]
        return super().take(len(self.records), seconds)

    def assign(self, topic: str, starts: Mapping[int, int]) -> None:
        self._at, self._stopped = dict(starts), set[int]()

    def pause(self, topic: str, partitions: Collection[int]) -> None:
        self._stopped |= set(partitions)

    def resume(self, topic: str, partitions: Collection[int]) -> None:
        self._stopped -= set(partitions)


def test_a_partition_that_is_hardly_read_does_not_fill_the_memory_from_batch_to_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Event time may hold it back while others are read."""
    client = Endless(size=100)
    monkeypatch.setattr(fetch, "AHEAD_BYTES", 500_000)
    monkeypatch.setattr(fetch, "_client", lambda settings, headers: client)
    fetcher = Fetcher(KafkaSettings("nowhere:1"), "legs", "g")
    read: dict[int, list[int]] = {0: [], 1: []}
    for batch in range(100):
        hardly = [Range(0, at, at + 1) for at in [len(read[0])] if batch % 2 == 0]
        for table in fetcher.read([*hardly, Range(1, 300 * batch, 300 * batch + 300)], stays=True):
            for partition, offset in zip(*(table[one].to_pylist() for one in ("partition", "offset")), strict=True):
                read[partition].append(offset)
        assert sum(one.nbytes for ahead in fetcher._ahead.values() for one in ahead) < 1_000_000
    assert read == {0: [*range(50)], 1: [*range(30_000)]}


def test_what_is_kept_of_a_batch_does_not_keep_the_large_records_of_another_partition() -> None:
    values = [b"s"] * 100 + [b"l" * 100_000] * 50
    batch = pa.RecordBatch.from_pydict({"value": pa.array(values), "partition": pa.array([0] * 100 + [1] * 50)})
    for partition, size, whole in ((0, 1, False), (1, 100_000, True)):
        kept = fetch._filtered(batch, batch["partition"].to_numpy() == partition)
        assert {*kept["partition"].to_pylist()} == {partition}
        assert {*map(len, kept["value"].to_pylist())} == {size}
        assert (kept.get_total_buffer_size() == batch.get_total_buffer_size()) is whole


def test_the_last_records_are_found_in_few_calls_when_the_chunk_is_nearly_full_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Listed((0, 0, 49_990), (0, 49_990, 150_000), (1, 0, 20))
    monkeypatch.setattr(fetch, "_client", lambda settings, headers: client)
    fetcher = Fetcher(KafkaSettings("nowhere:1"), "legs", "g")
    found = list(fetcher.read([Range(0, 0, 49_990), Range(1, 0, 20)], stays=True))
    assert sum(table.num_rows for table in found) == 50_010
    assert len(client.asked) < 15


def test_a_partition_that_does_not_come_is_noticed_while_another_does(monkeypatch: pytest.MonkeyPatch) -> None:
    client, now = Listed((0, 0, 100_000), at_once=3), 1000.0

    def take(most: int, seconds: float) -> tuple[pa.RecordBatch, list[Event]]:
        nonlocal now
        now += seconds
        return Listed.take(client, most, seconds)

    monkeypatch.setattr(client, "take", take)
    monkeypatch.setattr(fetch, "_client", lambda settings, headers: client)
    monkeypatch.setattr("time.monotonic", lambda: now)
    fetcher = Fetcher(KafkaSettings("nowhere:1"), "legs", "g")
    with pytest.raises(BrokerUnavailable, match="legs:1: no records within 30 s"):
        list(fetcher.read([Range(0, 0, 10), Range(1, 0, 20)], stays=True))
    assert now < 1040


def test_a_partition_has_its_turn_on_a_slow_connection_although_many_others_are_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker answers in turn with some records of each partition, every 8 s."""
    client, now, turn = Endless(), 1000.0, 0

    def take(most: int, seconds: float) -> tuple[pa.RecordBatch, list[Event]]:
        nonlocal now, turn
        now, turn = now + 8, turn + 1
        while (turn % 20) in client._stopped:
            turn += 1
        others, client._stopped = client._stopped, {*range(20)} - {turn % 20}
        taken = Endless.take(client, 500, seconds)
        client._stopped = others
        return taken

    monkeypatch.setattr(client, "take", take)
    monkeypatch.setattr(fetch, "_client", lambda settings, headers: client)
    monkeypatch.setattr("time.monotonic", lambda: now)
    fetcher = Fetcher(KafkaSettings("nowhere:1"), "legs", "g")
    for batch in range(3):
        ends = [(batch + 1) * (700 if partition == 5 else 500) for partition in range(20)]
        ranges = [Range(partition, end - end // (batch + 1), end) for partition, end in enumerate(ends)]
        assert sum(table.num_rows for table in fetcher.read(ranges, stays=True)) == 20 * 500 + 200


def test_no_more_is_asked_for_than_is_missing_while_only_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client would wait for more."""
    client = Listed((0, 0, 100))
    monkeypatch.setattr(fetch, "_client", lambda settings, headers: client)
    [_] = Fetcher(KafkaSettings("nowhere:1"), "legs", "g").read([Range(0, 0, 100)], stays=True)
    assert client.asked == [100]


def test_a_chunk_is_complete_after_a_number_of_bytes_of_headers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a few bytes with headers of a megabyte would otherwise fill the memory."""
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 1000)
    client = Listed((0, 0, 20), at_once=1, size=300)
    monkeypatch.setattr(fetch, "_client", lambda settings, headers: client)
    tables = Fetcher(KafkaSettings("nowhere:1"), "legs", "g", headers=True).read([Range(0, 0, 20)], stays=True)
    assert [table.num_rows for table in tables] == [3] * 6 + [2]


def test_a_consumer_that_no_run_uses_any_more_is_closed_and_the_next_call_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Listed] = []

    def make(settings: object, *, headers: bool) -> Listed:
        made.append(Listed((0, 0, 10)))
        return made[-1]

    now = 1000.0
    monkeypatch.setattr(fetch, "_client", make)
    monkeypatch.setattr("time.monotonic", lambda: now)
    settings = KafkaSettings("nowhere:1")
    first = fetch.fetcher_of(settings, "legs", "closed", headers=False)
    now += 59
    assert len(list(first.read([Range(0, 0, 10)], stays=True))) == 1
    now += 59
    assert not fetch._close_unused()
    assert fetch.fetcher_of(settings, "legs", "closed", headers=False) is first
    now += 2
    fetch._close_unused()
    assert [one.closed for one in made] == [True]
    assert fetch.fetcher_of(settings, "legs", "closed", headers=False) is not first


def test_a_store_that_no_run_uses_any_more_is_closed_and_the_next_call_has_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    url = f"sqlite:///{tmp_path}/states.db"
    first = clients.store_of(url)
    first.acquire_epoch(FlowRef("fleet", 1))
    now += 59
    assert clients.store_of(url) is first
    now += 59
    clients._close_unused()
    assert clients.store_of(url) is first
    assert (tmp_path / "states.db-wal").exists(), "the file is open"
    now += 61
    clients._close_unused()
    assert not (tmp_path / "states.db-wal").exists(), "SQLite removes it when the last connection is closed"
    assert clients.store_of(url) is not first
    assert clients.store_of(url).installed_epoch(FlowRef("fleet", 1)) == 1
    clients.store_of(url).close()

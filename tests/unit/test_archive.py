"""Which records an archive has, in which order it yields them, and what makes it unusable."""

import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from aggregations import Fields, Flow, Json, Topic, count
from aggregations.definition.element import Record
from aggregations.engine import archive as module
from aggregations.engine import delivered_rows
from aggregations.engine.archive import Archive, open_archive
from aggregations.engine.archived import gaps, topics_with_archive
from aggregations.engine.message_objects import HEADERS
from aggregations.engine.options import RunOptions
from aggregations.engine.ranges import Range
from aggregations.errors import FlowError, RunRefusedError
from envelope import TopicPartition
from persistence.kafka import KafkaSettings
from persistence.kafka.facts import Watermarks
from tests.support.archives import row, write

ZERO, ONE = TopicPartition("legs", 0), TopicPartition("legs", 1)
LOW = {ZERO: Watermarks(1_000, 2_000), ONE: Watermarks(1_000, 2_000)}


def opened(location: str, *, headers: bool = False) -> Archive:
    return open_archive(location, ["legs"], headers=headers).beside(LOW)


def read(archive: Archive, *ranges: Range) -> list[pa.Table]:
    return list(archive.read(ranges, lambda left: pytest.fail(f"{left} are in the archive")))


def offsets(tables: Sequence[pa.Table], partition: int = 0) -> list[int]:
    return [one["offset"] for table in tables for one in table.to_pylist() if one["partition"] == partition]


def test_records_have_the_columns_of_those_that_are_fetched(tmp_path: Path) -> None:
    sent = row(0, b"a", timestamp=1_500_999, headers=[{"key": "h", "value": b"1"}])
    rows = [sent, row(1, key=None, value=None, headers=None, timestamp=-1_000)]
    [table] = read(opened(write(tmp_path / "a.parquet", rows), headers=True), Range(0, 0, 2, "legs"))
    kinds = {name: table.schema.field(name).type for name in table.schema.names}
    text = pa.dictionary(pa.int32(), pa.string())
    times = pa.timestamp("ms")
    assert kinds == {
        "key": pa.binary(),
        "value": pa.binary(),
        "offset": pa.int64(),
        "timestamp": times,
        "headers": HEADERS,
        "partition": pa.int32(),
        "topic": text,
    }
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == [1_500, -1]
    assert table.column("headers").to_pylist() == [sent["headers"], []]
    assert table.column("value").to_pylist() == [b"a", None]


@pytest.mark.parametrize("group", [7, 50, 1_000])
def test_rows_in_any_order_of_any_files_are_read_in_order_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    for one in (module, delivered_rows):
        monkeypatch.setattr(one, "CHUNK_RECORDS", 20)
    rng = random.Random(5)
    rows = [row(offset, b"%d" % offset, partition=partition) for offset in range(300) for partition in (0, 1)]
    rows += rng.sample(rows, 90)
    rng.shuffle(rows)
    for part in range(3):
        write(tmp_path / "lake" / f"{part}.parquet", rows[part::3], group=group)
    archive = pickle.loads(pickle.dumps(opened(f"parquet:{tmp_path}/lake")))
    tables = read(archive, Range(0, 5, 290, "legs"), Range(1, 100, 200, "legs"))
    assert offsets(tables) == [*range(5, 290)]
    assert offsets(tables, 1) == [*range(100, 200)]
    assert max(table.num_rows for table in tables) <= 20
    assert tables[0].column("value").to_pylist()[:2] == [b"5", b"6"]


def test_what_the_archive_does_not_have_is_fetched(tmp_path: Path) -> None:
    archive = open_archive(write(tmp_path / "a.parquet", map(row, range(10))), ["legs"], headers=False)
    archive = archive.beside({ZERO: Watermarks(6, 40), ONE: Watermarks(0, 40)})
    asked: list[Range] = []

    def fetch(ranges: Sequence[Range]) -> Iterator[pa.Table]:
        asked.extend(ranges)
        yield from ()

    tables = list(archive.read([Range(0, 2, 30, "legs"), Range(1, 0, 4, "legs")], fetch))
    assert offsets(tables) == [*range(2, 10)]
    assert asked == [Range(0, 10, 30, "legs"), Range(1, 0, 4, "legs")]


@pytest.mark.parametrize(
    ("runs", "low", "until", "missing"),
    [
        ([(0, 50)], 30, 50, []),  # to its end
        ([(0, 40), (45, 50)], 30, 40, []),  # Kafka fills what it has
        ([(0, 20), (25, 50)], 30, 50, [(20, 25)]),
        ([(0, 20)], 30, 30, [(20, 30)]),
        ([(5, 50)], 30, 50, []),  # a log that begins with 5
        ([(0, 30)], 30, 30, []),
        ([(0, 20), (40, 50)], 30, 30, [(20, 30)]),
        ([(40, 50)], 30, 0, []),  # Kafka has more
    ],
)
def test_an_archive_counts_up_to_its_end_or_a_hole_that_kafka_fills(
    runs: list[tuple[int, int]], low: int, until: int, missing: list[tuple[int, int]]
) -> None:
    archive = Archive("parquet:a", {}, {ZERO: runs}).beside({ZERO: Watermarks(low, 60)})
    assert archive.until.get(ZERO, 0) == until
    first = archive.low(ZERO, low)
    assert first == (runs[0][0] if until else low)
    assert archive.missing(ZERO, first, 60) == missing
    assert archive.count(ZERO, first, 60) == until - (first if until else 0) - sum(end - at for at, end in missing)
    assert archive.missing(ZERO, 30, 60) == []
    assert archive.low(ONE, 7) == 7


def test_a_gap_names_what_is_missing_and_how_to_go_on() -> None:
    archive = Archive("parquet:a", {}, {ZERO: [(0, 3), (5, 6)]}).beside(LOW)
    [found] = gaps("fleet", archive, [Range(0, 1, 1_500, "legs")])
    assert (found.risk, found.unsafe) == ("gap", True)
    assert "parquet:a lacks offsets 3 to 4, 6 to 999 of legs:0" in found.what
    assert "accept the risk" in found.remedy
    assert gaps("fleet", archive, [Range(0, 0, 3, "legs")]) == gaps("fleet", None, [Range(0, 0, 9, "legs")]) == []


def test_a_glob_directories_that_name_columns_and_a_uri_are_locations(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    for partition in (0, 1):
        place = lake / "date=2026-11-24" / "topic=legs" / f"partition={partition}" / "part.parquet"
        write(place, [row(9, b"%d" % partition)])
        table = pa.parquet.ParquetFile(place).read().drop_columns(["topic", "partition"])
        pa.parquet.write_table(table, place)
    write(lake / "_temporary" / "a.parquet", [row(1)])
    write(lake / ".b.parquet", [row(2)])
    (lake / "_SUCCESS").touch()
    for location in (lake, f"{lake}/*", f"{lake}/date=*/topic=legs", f"file://{lake}", f"{lake}/**/*.parquet"):
        archive = opened(f"parquet:{location}")
        assert archive.runs == {ZERO: [(9, 10)], ONE: [(9, 10)]}
        [table] = read(archive, Range(1, 9, 10, "legs"))
        assert table.column("value").to_pylist() == [b"1"]
    assert opened(f"parquet:{lake}/*/*/partition=1/*").runs == {ONE: [(9, 10)]}


def test_rows_of_other_topics_are_passed_over(tmp_path: Path) -> None:
    rows = [row(0), row(0, b"other", topic="fuels"), row(1)]
    assert opened(write(tmp_path / "a.parquet", rows)).runs == {ZERO: [(0, 2)]}
    assert opened(write(tmp_path / "b.parquet", [row(0, topic="fuels")])).runs == {}


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    location = write(tmp_path / "lake" / "a.parquet", map(row, range(3)))
    archive = opened(f"parquet:{tmp_path}/lake")
    write(tmp_path / "lake" / "b.parquet", [row(3)])
    assert opened(f"parquet:{tmp_path}/lake").runs == {ZERO: [(0, 4)]}
    Path(location.removeprefix("parquet:")).unlink()
    with pytest.raises(RunRefusedError, match="cannot be read"):
        read(pickle.loads(pickle.dumps(archive)), Range(0, 0, 3, "legs"))


def test_the_first_offset_of_a_time_is_found_in_any_order(tmp_path: Path) -> None:
    rows = [row(offset, timestamp=at * 1_000) for offset, at in [(3, 40), (0, 10), (4, 30), (1, 30), (2, 20)]]
    archive = opened(write(tmp_path / "a.parquet", rows, group=2))
    assert [archive.first_at(ZERO, at) for at in (0, 10, 11, 31, 41)] == [0, 0, 1, 3, None]
    assert archive.first_at(ONE, 0) is None


@pytest.mark.parametrize(
    ("without", "types", "text"),
    [
        ("offset", {}, "has no column 'offset'; an archive needs the columns of Spark's Kafka source: key, value"),
        ("headers", {}, "has no column 'headers'.*includeHeaders"),
        ("", {"value": pa.string()}, "column 'value' is string; it must be binary, so cast it"),
        ("", {"offset": pa.int32()}, "column 'offset' is int32; it must be bigint"),
        ("", {"partition": pa.int64()}, "column 'partition' is int64; it must be int"),
        ("", {"timestamp": pa.int64()}, "column 'timestamp' is int64; it must be timestamp"),
        ("", {"topic": pa.binary()}, "column 'topic' is binary; it must be string"),
        ("", {"headers": pa.list_(pa.string())}, "column 'headers' is list.*it must be array<struct"),
    ],
)
def test_missing_columns_and_wrong_types(
    tmp_path: Path, without: str, types: dict[str, pa.DataType], text: str
) -> None:
    rows = [] if {"headers", "value"} & types.keys() else [row(1)]
    location = write(tmp_path / "lake" / "b.parquet", rows, without=without, **types)
    with pytest.raises(RunRefusedError, match=text):
        opened(location, headers=True)
    write(tmp_path / "lake" / "a.parquet", [row(0)])
    with pytest.raises(RunRefusedError, match=text):  # also if only a later file is so
        opened(f"parquet:{tmp_path}/lake", headers=True)


def test_a_topic_of_digits_is_a_name_also_as_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "topic=007" / "partition=0" / "day=2026-01-01" / "0.parquet", [row(0)], without="topic")
    write(tmp_path / "topic=a%20b" / "0.parquet", [row(5)], without="topic")
    archive = open_archive(f"parquet:{tmp_path}", ["007", "a b"], headers=False)
    assert archive.runs == {TopicPartition("007", 0): [(0, 1)], TopicPartition("a b", 0): [(5, 6)]}
    (table,) = archive.beside({}).read([Range(0, 0, 1, "007")], lambda left: pytest.fail(f"{left}"))
    assert table.column("topic").to_pylist() == ["007"]


@pytest.mark.parametrize(
    "file", ["_delta_log/00000000000000000000.json", ".hoodie/hoodie.properties", "v1.metadata.json"]
)
def test_a_table_with_versions_is_no_archive(tmp_path: Path, file: str) -> None:
    """Its directory keeps files that the table no longer has."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("{}")
    write(tmp_path / "0.parquet", [row(0)])
    with pytest.raises(RunRefusedError, match="is a table with versions"):
        opened(f"parquet:{tmp_path}")


def test_headers_may_be_missing_if_the_flow_reads_none(tmp_path: Path) -> None:
    assert opened(write(tmp_path / "a.parquet", [row(0)], without="headers")).runs == {ZERO: [(0, 1)]}


@pytest.mark.parametrize("name", ["topic", "partition", "offset", "timestamp"])
def test_rows_without_coordinates(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunRefusedError, match=f"a.parquet: rows have no {name}.*remove them"):
        opened(write(tmp_path / "a.parquet", [row(0), {**row(1), name: None}]))


@pytest.mark.parametrize("name", ["partition", "offset"])
def test_rows_with_negative_coordinates(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunRefusedError, match=f"a.parquet: rows have a negative {name}.*remove them"):
        opened(write(tmp_path / "a.parquet", [row(0), {**row(1), name: -1}]))


@pytest.mark.parametrize("without", ["", "headers"])
def test_single_records_have_the_headers_that_the_archive_has(tmp_path: Path, without: str) -> None:
    rows = [row(offset, b"%d" % offset, headers=[{"key": "h", "value": None}]) for offset in range(9)]
    archive = opened(write(tmp_path / "a.parquet", rows, without=without))
    headers = () if without else (("h", None),)
    assert [*archive.chosen(ZERO, {7, 2})] == [
        Record("legs", 0, 2, b"k", b"2", 1, headers),
        Record("legs", 0, 7, b"k", b"7", 1, headers),
    ]


def test_two_records_at_one_offset(tmp_path: Path) -> None:
    write(tmp_path / "lake" / "a.parquet", map(row, range(10)))
    write(tmp_path / "lake" / "b.parquet", [row(4, b"other")])
    with pytest.raises(
        RunRefusedError, match=r"two different records at legs:0:4: they are of two topics.*Give an archive"
    ):
        opened(f"parquet:{tmp_path}/lake")


def test_locations_without_an_archive(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no Parquet")
    for name, text in {
        "none.parquet": "there is no Parquet file",
        "*.none": "there is no Parquet file",
        "text.parquet": "cannot be read: .*Give Parquet files",
        "": "cannot be read: .*Give Parquet files",
    }.items():
        with pytest.raises(RunRefusedError, match=text):
            opened(f"parquet:{tmp_path}/{name}")
    with pytest.raises(RunRefusedError, match="cannot be read"):
        opened("parquet:nowhere://bucket/a")


@pytest.mark.parametrize("history", ["lake", "parquet:", "", "delta:lake", 5])
def test_an_option_that_is_no_location(history: object) -> None:
    flow = Flow("f").source(Topic("legs", payload=Json({"a": str}))).aggregate("s", "a", Fields(n=count()))
    options = RunOptions(kafka=KafkaSettings("a:1"), stores="lmdb:///tmp/s", history=history)  # type: ignore[arg-type]
    with pytest.raises(FlowError, match="write parquet:PATH"):
        options.bound(flow)
    with pytest.raises(FlowError, match="write parquet:PATH"):
        topics_with_archive(options, flow)
    with pytest.raises(FlowError, match="kafka="):
        RunOptions(stores="lmdb:///tmp/s", history="parquet:lake").bound(flow)

"""The benchmark's own arithmetic: the exact result, medians, ratios, exit codes and the plot."""

import json
import random
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import polars as pl
import pytest

from benchmarks import __main__ as command
from benchmarks import workload
from benchmarks.bench import Plan, batch_size
from benchmarks.measure import Difference, Mark, Run, compare
from benchmarks.peers import python_loop
from benchmarks.peers.base import AT_LEAST_ONCE, EXACTLY_ONCE
from benchmarks.peers.systems import NAMES, chosen
from benchmarks.plot import svg
from benchmarks.report import Subject, ratios
from benchmarks.workload import COLUMNS, Oracle, Workload, draw
from envelope import decode
from jobs.demo.leg_pb2 import Leg


def table(*rows: tuple[str, int, int, int]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=COLUMNS, orient="row")


def run(rate: float = 1000.0, *, keys: int = 0, events: int = 0) -> Run:
    """A run over 4,000 events whose second half is drained at `rate`; the system uses 10 CPU seconds for it."""
    first = Mark(1.0, 500, {"jvm": 1.0, "kafka": 0.5})
    half = Mark(2.0, 2000, {"jvm": 2.0, "kafka": 1.0})
    last = Mark(2.0 + 2000 / rate, 4000, {"jvm": 9.0, "workers": 3.0, "kafka": 3.0})
    return Run(first, half, last, Difference(keys, events, events), {"jvm": 100})


def subject(system: str, store: str, *runs: Run, guarantee: str = EXACTLY_ONCE, **more: str) -> Subject:
    return Subject(system, store, guarantee, 100, 4000, list(runs), **more)


def test_the_oracle_agrees_with_a_plain_dictionary() -> None:
    rng = random.Random(3)
    oracle, expected = Oracle(50), defaultdict(list)
    for _ in range(500):
        key, minutes, delay = rng.randrange(50), rng.randrange(400), rng.randrange(-90, 90)
        oracle.add(key, minutes, delay)
        expected[workload.name(key)].append((minutes, delay))
    assert oracle.result().rows() == [
        (key, len(of), sum(minutes for minutes, _ in of), max(delay for _, delay in of))
        for key, of in sorted(expected.items())
    ]


def test_the_expected_result_is_that_of_the_distinct_records_of_the_topic() -> None:
    oracle = Oracle(40)
    sent = [message["value"] for message in draw(Workload(3000, 40, 0.2), "t0", oracle)]
    assert len(sent) == 3000
    assert 0.7 < len(set(sent)) / 3000 < 0.9
    legs = [Leg.FromString(decode(value).payload) for value in set(sent)]
    rows = [(leg.tail, leg.air_minutes, leg.arr_delay) for leg in legs]
    by_key = pl.DataFrame(rows, schema=["key", "minutes", "delay"], orient="row").group_by("key")
    result = by_key.agg(count=pl.len().cast(pl.Int64), sum=pl.col("minutes").sum(), max=pl.col("delay").max())
    assert oracle.result().equals(result.sort("key"))


def test_a_record_is_keyed_as_its_envelope_and_new_events_of_a_key_rise_in_one_root_partition() -> None:
    lanes: dict[bytes, tuple[int, int]] = {}
    seen = set()
    for message in draw(Workload(2000, 30, 0.1), "t0", Oracle(30)):
        envelope = decode(message["value"])
        (hop,) = envelope.chain
        assert (envelope.key, envelope.destination) == (message["key"], "t0")
        partition, offset = lanes.get(envelope.key, (hop.partition, -1))
        assert hop.partition == partition
        assert (hop.offset > offset) is (message["value"] not in seen)
        seen.add(message["value"])
        lanes[envelope.key] = (partition, max(offset, hop.offset))


def test_the_same_seed_draws_the_same_events_and_another_seed_others() -> None:
    one, again, other = ([*draw(Workload(500, 10, 0.05, seed), "t0", Oracle(10))] for seed in (7, 7, 8))
    assert one == again
    assert one != other


def test_the_python_loop_leaves_out_copies() -> None:
    oracle, states = Oracle(20), defaultdict[bytes, python_loop.State](lambda: [0, 0, None, {}])
    for message in draw(Workload(2000, 20, 0.3), "t0", oracle):
        python_loop.fold(states, set(), message["key"], message["value"])
    found = table(*((key.decode(), *state[:3]) for key, state in states.items()))
    assert compare(found, oracle.result()) == Difference()


def test_micro_batches_are_equal_parts_with_nothing_left_for_another() -> None:
    assert [batch_size(events, 500_000) for events in (600, 3_000_000, 9_000_000)] == [116, 500_016, 500_016]
    assert batch_size(3_100_000, 500_000) == 442_874


def test_an_exact_result_has_no_difference_in_whatever_order_it_is_read() -> None:
    expected = table(("a", 2, 30, 5), ("b", 1, 7, -1))
    assert compare(expected.reverse(), expected) == Difference()


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ([("a", 3, 30, 5), ("b", 1, 7, -1)], Difference(1, 1, -1)),
        ([("a", 2, 31, 5), ("b", 1, 7, -1)], Difference(1, 0, 0)),
        ([("a", 2, 30, 4), ("b", 1, 7, -1)], Difference(1, 0, 0)),
        ([("a", 2, 30, 5)], Difference(1, 1, 1)),
        ([("a", 2, 30, 5), ("b", 1, 7, -1), ("c", 4, 1, 1)], Difference(1, 4, -4)),
        ([], Difference(2, 3, 3)),
        ([("a", 1, 30, 5), ("b", 2, 7, -1)], Difference(2, 2, 0)),
    ],
)
def test_a_wrong_missing_or_strange_row_is_a_difference(
    found: list[tuple[str, int, int, int]], difference: Difference
) -> None:
    assert compare(table(*found), table(("a", 2, 30, 5), ("b", 1, 7, -1))) == difference


def test_the_warm_figures_are_those_of_the_second_half() -> None:
    one = run(500.0)
    assert one.warm == 500.0
    assert one.from_start == 4000 / 6.0
    assert one.warm_cpu == {"jvm": 3500.0, "workers": 1500.0, "kafka": 1000.0}


def test_a_run_of_a_single_commit_has_no_warm_figures() -> None:
    only = Mark(2.0, 4000, {"jvm": 2.0})
    one = Run(only, only, only, Difference())
    assert (one.warm, one.warm_cpu) == (None, None)
    told = subject("headwater", "sqlite", one).as_json()
    assert (told["events_per_second"], told["cpu_seconds_per_million"], told["from_start"]) == (None, None, 2000)


def test_figures_are_medians_and_servers_are_not_part_of_a_systems_cpu() -> None:
    told = subject("headwater", "sqlite", run(900.0), run(100.0), run(1000.0)).as_json()
    assert told["events_per_second"] == 900
    assert told["each_round"] == [900, 100, 1000]
    assert told["cpu_seconds_per_million"] == 5000.0
    assert told["cpu_by_part"] == {"jvm": 3500.0, "workers": 1500.0, "kafka": 1000.0}
    assert told["verified"] is True
    assert json.loads(json.dumps(told)) == told


def test_one_wrong_round_makes_a_system_unverified_and_shows_how_far_it_was_off() -> None:
    one = subject("kafka-streams", "rocksdb", run(), run(keys=3, events=4), run())
    assert one.as_json()["verified"] is False
    assert one.as_json()["off_by"] == {"keys": 3, "events": 4, "missing": 4}
    assert one.breaks_its_claim


def test_a_system_that_claims_less_or_cannot_run_breaks_no_claim() -> None:
    assert not subject("python-loop", "redis", run(keys=1, events=1), guarantee=AT_LEAST_ONCE).breaks_its_claim
    assert not subject("kafka-streams", "rocksdb", unavailable="no jars").breaks_its_claim
    assert subject("kafka-streams", "rocksdb", failed="it ended").breaks_its_claim


def test_ratios_are_given_by_number_of_keys_and_store() -> None:
    subjects = [
        subject("headwater", "sqlite", run(500.0)),
        subject("headwater", "redis", run(250.0)),
        subject("kafka-streams", "rocksdb", run(1000.0)),
        subject("kafka-streams-sink", "rocksdb", run(10.0)),
    ]
    assert ratios(subjects, lambda one: one.warm) == {"100": {"sqlite": 0.5, "redis": 0.25}}
    assert ratios(subjects, lambda one: one.from_start) == {"100": {"sqlite": 0.67, "redis": 0.4}}
    assert ratios(subjects, lambda one: one.cpu) == {"100": {"sqlite": 1.0, "redis": 1.0}}
    assert ratios(subjects[:2], lambda one: one.warm) == {}
    assert ratios([subject("headwater", "sqlite"), *subjects[2:]], lambda one: one.warm) == {}


def test_the_plot_has_a_bar_for_each_rate_and_says_what_has_none() -> None:
    subjects = [
        subject("headwater", "sqlite", run(500.0)),
        subject("kafka-streams", "rocksdb", run(1000.0, keys=1)),
        subject("<peer>", "cassandra", unavailable="no jars"),
    ]
    drawn = ET.fromstring(svg(subjects))
    bars = [one for one in drawn.iter("{http://www.w3.org/2000/svg}rect") if one.get("class") != "card"]
    assert [one.get("class") for one in bars] == ["ours", "off"]
    assert float(bars[0].get("width")) * 2 == pytest.approx(float(bars[1].get("width")), abs=0.2)
    texts = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"100 keys", "500", "1,000, not verified", "<peer>, cassandra", "unavailable"} <= set(texts)


@pytest.mark.parametrize(
    ("subjects", "code"),
    [
        ([subject("headwater", "sqlite", run())], command.OK),
        ([subject("headwater", "sqlite", run(keys=1))], command.NOT_VERIFIED),
        ([subject("headwater", "sqlite", run()), subject("kafka-streams", "rocksdb", unavailable="no")], command.OK),
        ([subject("kafka-streams", "rocksdb", unavailable="no")], command.UNAVAILABLE),
    ],
)
def test_the_command_ends_with_one_object_and_the_code_of_what_was_found(
    subjects: list[Subject],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "bench", lambda plan, logs, found: found.extend(subjects))
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert command.main(["--json", "--out", str(tmp_path)]) == code
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert [one["system"] for one in told["systems"]] == [one.system for one in subjects]
    assert told["ratio"] == {}
    assert json.loads((tmp_path / "bench.json").read_text()) == told
    assert (tmp_path / "bench.svg").read_text().startswith("<svg")
    assert command.main(["--out", str(tmp_path)]) == code
    assert subjects[0].system in capsys.readouterr().out


def test_an_interrupted_benchmark_tells_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(plan: object, logs: Path, found: list[Subject]) -> None:
        found += [subject("headwater", "sqlite", run()), subject("kafka-streams", "rocksdb")]
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "bench", interrupted)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert command.main(["--json", "--out", str(tmp_path)]) == command.INTERRUPTED
    measured, other = json.loads(capsys.readouterr().out)["systems"]
    assert (measured["verified"], measured["rounds"]) == (True, 1)
    assert (other["verified"], other["rounds"]) == (False, 0)
    assert command.main(["--out", str(tmp_path)]) == command.INTERRUPTED
    assert "not run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [["--only", "flink"], ["--keys", "0"], ["--keys", "many"], ["--resent", "1"], ["--stores", "rocksdb"]]
)
def test_a_wrong_option_ends_with_code_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(wrong)
    assert ended.value.code == command.USAGE
    assert wrong[0] in capsys.readouterr().err


def test_without_stores_the_ratios_are_those_of_the_default_store_and_of_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(plan: Plan, logs: Path, found: list[Subject]) -> None:
        found += [subject(peer.name, peer.store, run()) for peer in plan.peers]

    monkeypatch.setattr(command, "bench", measured)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    assert command.main(["--only", "headwater,kafka-streams", "--json", "--out", str(tmp_path)]) == command.OK
    assert json.loads(capsys.readouterr().out)["ratio"] == {"100": {"lmdb": 1.0, "redis": 1.0}}


def test_systems_come_in_one_order_and_headwater_once_for_each_store() -> None:
    found = chosen([*reversed(NAMES)], ["sqlite", "redis"])
    ours = [name for name in NAMES if name.startswith("headwater") for _ in range(2)]
    assert [peer.name for peer in found] == [*ours, *NAMES[len(ours) // 2 :]]
    assert [peer.store for peer in found[:2]] == ["sqlite", "redis"]

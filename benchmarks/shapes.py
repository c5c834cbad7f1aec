"""Other shapes of work beside the plain one: several stages or sources, windows, a table, filters, larger messages.

    python benchmarks/shapes.py [--events 2000000] [--keys 10000] [--batch 500000] [--rounds 3] [--store lmdb|sqlite] [--json]

Each shape has a topic of its own on one broker. Shapes take turns, round by round, each on a new store, and their
medians are compared with the plain shape: one stage, envelopes of one hop, 5 % sent again. `journal` is the
plain shape with the journal. `replay` folds the plain
topic, then the same records once more at new offsets; only the second run counts. `two sources` divides the events over
two topics, `windows` are of an hour, and states expire (`expiry`) after one. `sketches` are quantiles and a distinct
count. `lookup` finds the carrier of the second stage in a table of all keys, whose batches do not count. In `table`
only the batches of a table count: rows of random keys, of which every tenth is a tombstone. Before a filter, envelopes
have no hop: the filter alone drops what is sent again, and its largest state is in the result. The sum of every run's
states must be the number of unique inputs, and the rows of `table` are compared by a sum. All batches but the first and
the last are warm.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from datetime import timedelta
from itertools import pairwise

import polars as pl

from aggregations.definition.aggregates import count
from aggregations.definition.aggregates_sketches import approximate_distinct, quantiles
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.lookups import LatestRow
from aggregations.definition.source import Json, Topic
from aggregations.definition.windows import tumbling
from aggregations.engine.options import RunOptions
from aggregations.run.states import state_of
from aggregations.spark import run_flow
from aggregations.spark.session import session
from benchmarks.engine import FOLDS, flow_of, spent
from benchmarks.workload import PARTITIONS, Workload, fill, name
from envelope.filters import (
    EventIdFilter,
    ProducerFilter,
    Scope,
    SequenceFilter,
    SessionWindows,
    TimeWindows,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
    from_envelope,
    from_header,
)
from jobs import stack
from jobs.demo.leg_pb2 import Leg
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics
from persistence.protocol import FlowRef
from persistence.registry import open_store

HOUR = timedelta(hours=1)
NUMBERS = from_envelope("sequence")
OPEN = timedelta(milliseconds=20_000 * PARTITIONS)
FILTERS = {
    "sequence filter": SequenceFilter(NUMBERS),
    "sequence filter by key": SequenceFilter(NUMBERS, scope_by=Scope.KEY),
    "producer filter": ProducerFilter(),
    "event id filter": EventIdFilter(from_envelope("event_id"), horizon=HOUR, limit=20_000),
    "event ids in headers": EventIdFilter(from_header("ce_id"), horizon=HOUR, limit=20_000),
    "interval filter": deduplicate_by_key_value(from_envelope("event_id"), timedelta(seconds=2)),
    "over all partitions": deduplicate(from_envelope("event_id"), timedelta(seconds=2)),
    "changed key": deduplicate_by_key(timedelta(seconds=2), key=from_envelope("event_id")),
    "event ids over all partitions": EventIdFilter(
        from_envelope("event_id"), horizon=HOUR, limit=20_000, partitions=PARTITIONS
    ),
    # Each event has a window, or a session, of its own, so that all of them are passed on; a partition has 20,000 open ones.
    "distinct": distinct(TimeWindows(timedelta(milliseconds=1), grace=OPEN), time=NUMBERS),
    "session distinct": distinct(SessionWindows(timedelta(0), grace=OPEN), time=NUMBERS),
}
SHAPES = {
    "plain": {},
    "journal": {},
    "two sources": {},
    "windows": {},
    "expiry": {},
    "sketches": {},
    "two stages": {},
    "lookup": {},
    "table": {},
    "replay": {},
    "2 hops": {"hops": 2},
    "8 hops": {"hops": 8},
    "payload of 1 KiB": {"payload": 1024},
    **{shape: {"hops": 0, "numbered": True, "headers": shape.endswith("headers")} for shape in FILTERS},
}


TIMES = {"windows": {"window": tumbling("1h")}, "expiry": {"expire_after": "1h"}}
TABLE = "home"
JOURNAL = "journal"
TOMBSTONES = 10
"""In the shape `table`, every so many-th record is a tombstone."""
CHUNK = 10_000


def made(shape, topic):
    """The flow of a shape."""
    flow = flow_of(topic)
    legs = Fields(legs=count())
    if shape in FILTERS:
        [aggregate] = flow.steps
        source = Flow(flow.name).source(flow.topic).deduplicate(FILTERS[shape], name="filter")
        return source.aggregate(aggregate.name, aggregate.key, aggregate.fold)
    match shape:
        case "two sources":
            both = Flow("bench").source(Topic(topic, payload=Leg), Topic(f"{topic}b", payload=Leg))
            return both.aggregate("aircraft", key="tail", fold=FOLDS["fields"])
        case "windows" | "expiry":
            # Within two minutes: nearly all events of a stream that is read as it is written are in one window.
            time_ms = pl.lit(1_600_000_000_000) + pl.col("arr_delay") * 1_000
            timed = Flow("bench").source(Topic(topic, payload=Leg, time=time_ms))
            return timed.aggregate("aircraft", key="tail", fold=FOLDS["fields"], **TIMES[shape])
        case "sketches":
            fold = Fields(legs=count(), usual=quantiles("arr_delay"), minutes=approximate_distinct("air_minutes"))
            return Flow("bench").source(Topic(topic, payload=Leg)).aggregate("aircraft", key="tail", fold=fold)
        case "two stages":
            return flow.aggregate("carrier", key="carrier", fold=legs, co_partitioned=False)
        case "lookup":
            home = Topic(f"{topic}b", Json({"home": str}), envelope=False)
            return flow.lookup(TABLE, home, "tail").aggregate("carrier", key="home", fold=legs, co_partitioned=False)
        case "table":
            rows = Topic(topic, Json({"at": int}), envelope=False)
            legs_of = Flow("bench").source(Topic(f"{topic}b", payload=Leg))
            return legs_of.aggregate("aircraft", key="tail", fold=legs).lookup(TABLE, rows, "tail")
    return flow


def fill_beside(shape, topic, settings, topics, keys, filled):
    """Fill the second topic of a shape that has one; return its number of unique inputs."""
    if shape == "two sources":
        topics.create(f"{topic}b", PARTITIONS)
        return filled(shape, f"{topic}b")
    if shape == "lookup":
        topics.create(f"{topic}b", PARTITIONS, {"cleanup.policy": "compact"})
        rows = ((name(key), json.dumps({"home": f"C{key % 16:02d}"})) for key in range(keys))
        with AcknowledgedProducer(settings) as producer:
            producer.send_many(f"{topic}b", [{"key": key.encode(), "value": row.encode()} for key, row in rows])
            producer.flush()
    return 0


def fill_table(settings, topic, events, keys):
    """Fill a topic with numbered rows of random keys, and tombstones; return the sum of the numbers that remain."""
    draw, last = random.Random(1), {}

    def row(number):
        key = name(draw.randrange(keys))
        last[key] = 0 if number % TOMBSTONES == 0 else number
        return {"key": key.encode(), "value": json.dumps({"at": number}).encode() if last[key] else None}

    with AcknowledgedProducer(settings) as producer:
        for start in range(0, events, CHUNK):
            producer.send_many(topic, [row(number) for number in range(start, min(start + CHUNK, events))])
        producer.flush()
    return sum(last.values())


def fold(shape, topic, settings, servers, url, batch):
    """Drain a topic.

    Returns:
        (events per second, CPU seconds per million) of each warm batch, the folded events, and the bytes of the largest
        state of a filter.
    """
    flow = made(shape, topic)
    marks = []

    def note(report):
        cost = sum(seconds for part, seconds in spent(servers).items() if part not in servers)
        marks.append(
            (time.perf_counter(), cost, report.records if (TABLE in report.verdicts) == (shape == "table") else 0)
        )

    run_flow(
        flow,
        RunOptions(
            kafka=settings,
            stores=url,
            dead_letters="dead",
            journal=JOURNAL if shape == "journal" else None,
            until_caught_up=True,
            max_records=batch,
        ),
        progress=note,
    )
    stage = FlowRef("bench").stage(flow.stages[-1].name)
    store = open_store(url)
    if shape == "table":
        table = FlowRef("bench").stage(TABLE)
        rows = (LatestRow(()).result(state_of(stored, table, key).fold) for key, stored in store.scan(table))
        folded = sum(row["at"] for row in rows if row is not None)
    else:
        folded = sum(state_of(stored, stage, key).fold["legs"] for key, stored in store.scan(stage))
    filtered = FlowRef("bench").stage("filter")
    sizes = [len(stored.value) for _, stored in store.scan(filtered)] if shape in FILTERS else []
    store.close()
    first = next(number for number, (_, _, rows) in enumerate(marks) if rows)
    warm = list(pairwise(marks[first:]))[:-1]
    figures = [(rows / (t1 - t0), (c1 - c0) * 1e6 / rows) for (t0, c0, _), (t1, c1, rows) in warm]
    return figures, folded, max(sizes, default=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=500_000, help="records of a batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", default="lmdb", choices=("lmdb", "sqlite"))
    parser.add_argument("--shapes", default=",".join(SHAPES), help="some of: %(default)s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shapes = args.shapes.split(",")
    figures, states = {shape: [] for shape in shapes}, {}
    with stack.ephemeral(kafka=True, heap_mb=1024) as servers, session("bench", conf={"spark.driver.memory": "2g"}):
        settings = KafkaSettings(servers.kafka)
        topics = Topics(settings)
        topics.create("dead", 1)
        topics.create(JOURNAL, 1)
        pids = {one.name: one.pid for one in servers.servers}

        def filled(shape, topic):
            """Fill a topic; return the number of unique inputs, or what the rows of a table add up to."""
            if shape == "table":
                topics.create(f"{topic}b", PARTITIONS)
                return fill_table(settings, topic, args.events, args.keys)
            events = args.events // 2 if shape == "two sources" else args.events
            return fill(settings, topic, Workload(events, args.keys, **SHAPES[shape]), lambda done: None).unique

        unique = {}
        for number, shape in enumerate(shapes):
            if shape != "replay":  # it has a topic of its own in each round
                topics.create(f"t{number}", PARTITIONS)
                unique[shape] = filled(shape, f"t{number}")
                unique[shape] += fill_beside(shape, f"t{number}", settings, topics, args.keys, filled)
        for turn in range(args.rounds):
            for number, shape in enumerate(shapes):
                topic = f"t{number}"
                with tempfile.TemporaryDirectory() as directory:
                    url = f"{args.store}://{directory}/states"
                    if shape == "replay":
                        topic = f"r{turn}"
                        topics.create(topic, PARTITIONS)
                        unique[shape] = filled(shape, topic)
                        fold(shape, topic, settings, pids, url, args.batch)
                        filled(shape, topic)
                    found, folded, states[shape] = fold(shape, topic, settings, pids, url, args.batch)
                    assert folded == unique[shape], f"{shape}: folded {folded} of {unique[shape]}"
                figures[shape] += found
                if not args.json:
                    print(f"round {turn + 1}: {shape}: {[round(rate) for rate, _ in found]} events/s", flush=True)
    result = {
        shape: {
            "events_per_second": round(statistics.median(rate for rate, _ in found)),
            "cpu_seconds_per_million": round(statistics.median(cost for _, cost in found), 2),
        }
        for shape, found in figures.items()
    }
    for shape, one in result.items():
        if shape in FILTERS:
            one["largest_state_bytes"] = states[shape]
        if "plain" in result:
            one["by_plain"] = round(one["events_per_second"] / result["plain"]["events_per_second"], 3)
            one["cpu_by_plain"] = round(one["cpu_seconds_per_million"] / result["plain"]["cpu_seconds_per_million"], 3)
    told = {"events": args.events, "keys": args.keys, "exact": True, "shapes": result}
    print(json.dumps(told, indent=None if args.json else 2))


if __name__ == "__main__":
    main()

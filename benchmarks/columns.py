"""CPU of the vectorised path in a worker, microseconds per event and phase, without Spark and Kafka.

    python benchmarks/columns.py [--events 500000] [--keys 10000] [--resent 0.05] [--batches 4] [--store URL] [--json]

Batches of one partition go through the task code of the engine: decode, steps, load, fold and persist, once and then
again as pure duplicates. Two stages: the second is keyed by the carrier, of which there are sixteen. Sums of folded events are compared with the number of distinct ones.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.engine.columnar import ColumnarPath
from aggregations.engine.job import Attempt, Job, RunProgress
from aggregations.engine.options import RunOptions
from aggregations.engine.path import Work
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.states import state_of
from benchmarks.workload import Oracle, Workload, draw
from jobs.demo.leg_pb2 import Leg
from persistence.kafka import KafkaSettings

CHUNK = 50_000
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def batched(many, size):
    found = iter(many)
    return iter(lambda: list(islice(found, size)), [])


def flow_of():
    fold = Fields(legs=count(), minutes=total("air_minutes"), worst=maximum("arr_delay"))
    flow = Flow("bench").source(Topic("legs", payload=Leg)).aggregate("aircraft", key="tail", fold=fold)
    return flow.aggregate("carriers", key="carrier", fold=Fields(legs=count()), co_partitioned=False)


def tables(messages, first, per_ms=0):
    """The records of one batch, as the engine reads them; `per_ms` of them have the same timestamp, or all if it is 0."""
    for number, part in enumerate(batched(messages, CHUNK)):
        start = first + number * CHUNK
        headers = [[{"key": name, "value": value} for name, value in one.get("headers", ())] for one in part]
        yield pa.table(
            {
                "key": pa.array([one["key"] for one in part], pa.binary()),
                "value": pa.array([one["value"] for one in part], pa.binary()),
                "topic": pa.repeat("legs", len(part)),
                "partition": pa.array([0] * len(part), pa.int32()),
                "offset": pa.array(range(start, start + len(part)), pa.int64()),
                "timestamp": pa.array(
                    [1_700_000_000_000 + (row // per_ms if per_ms else 0) for row in range(start, start + len(part))],
                    pa.timestamp("ms"),
                ),
                **({"headers": pa.array(headers, HEADERS)} if any(headers) else {}),
            }
        )


class Bench:
    def __init__(self, url, flow=None):
        self.flow = flow or flow_of()
        self.urls = bind(self.flow, {}, url)
        self.run = begin(self.flow, self.urls)
        self.seconds = Counter()
        self.events = 0

    def process(self, chunks, name):
        """Fold and persist one batch; `name` is that of the run in the result."""
        run, path = self.run, ColumnarPath()
        ids = {"legs": "T1"}
        options = RunOptions(kafka=KafkaSettings("localhost:1"), stores=self.urls)
        progress = RunProgress(
            ref=run.ref, epoch=run.epoch, batch=run.batch, known=run.known, topic_ids=ids, ledger=run.ledger
        )
        work, writes = Work(Job(self.flow, options, progress, Attempt(asked=("raw",)))), []
        begin_at = time.process_time()
        rows = path.read(work, chunks)
        for stage in self.flow.stages:
            before = dict(work.report.seconds)
            found, rows = path.fold(work, stage, rows)
            for phase in ("load", "fold"):
                self.seconds[name, stage.name, phase] += work.report.seconds.get(phase, 0) - before.get(phase, 0)
            writes.append((stage, found))
        for stage, found in reversed(writes):
            start = time.process_time()
            store = run.stores[stage.name]
            store.save(run.stage_ref(stage), found, epoch=run.epoch, batch=run.batch)
            self.seconds[name, stage.name, "persist"] += time.process_time() - start
        for phase in ("decode", "steps"):
            self.seconds[name, "", phase] += work.report.seconds[phase]
        self.seconds[name, "", "all"] += time.process_time() - begin_at
        manifest = run.following({}, ids, {}, work.collector.changes)
        run.save_manifest("aircraft", manifest)
        run.advanced(manifest)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--resent", type=float, default=0.05)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--store", help="URL; a new SQLite file otherwise")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    oracle = Oracle(options.keys)
    messages = list(draw(Workload(options.events, options.keys, options.resent), "legs", oracle))
    unique = int(oracle.result()["count"].sum())
    size = -(-len(messages) // options.batches)
    parts = [list(tables(part, i * size)) for i, part in enumerate(batched(messages, size))]
    bench = Bench(options.store or f"sqlite://{tempfile.mkdtemp()}/bench.db")
    for number, name in enumerate(("new", "again")):
        for part in parts:
            moved = [chunk.set_column(4, "offset", pc.add(chunk["offset"], number * len(messages))) for chunk in part]
            bench.process(moved, name)
    ref, store = bench.run.ref.stage("aircraft"), bench.run.stores["aircraft"]
    folded = sum(state_of(stored, ref, key).fold["legs"] for key, stored in store.scan(ref))
    assert folded == unique, (folded, unique)
    micros = {
        " ".join(filter(None, key)): round(spent * 1e6 / options.events, 3) for key, spent in bench.seconds.items()
    }
    if options.json:
        print(json.dumps({"us_per_event": micros, "events": options.events, "unique": unique, "folded": folded}))
        return
    for name, spent in sorted(micros.items()):
        print(f"{name:28} {spent:7.3f} us")


if __name__ == "__main__":
    main()

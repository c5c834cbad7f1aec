"""CPU of a worker per event for a flow whose fold is plain Python, by phase; without Spark, broker and store.

    python benchmarks/python_fold.py [--rows 100000] [--keys 10000] [--batches 3] [--fold python|fields] [--emit] [--profile]

Envelopes of one republish hop, 5 % re-sent, as `benchmarks/engine.py` makes them. A task reads each batch, folds it and
encodes its states, as Spark's tasks do; the states are kept in memory. What was folded is compared with the oracle. The
last batch is timed.
"""

import argparse
import cProfile
import gc
import json
import pstats
import time
from itertools import islice

import polars as pl
import pyarrow as pa

from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.engine.job import Attempt, Job, RunProgress
from aggregations.engine.options import RunOptions
from aggregations.engine.path import Work, columnar_path
from aggregations.engine.roots import RootTopics
from aggregations.run.begin import begin
from aggregations.run.binding import bind
from aggregations.run.states import state_of
from benchmarks.engine import FOLDS
from benchmarks.workload import COLUMNS, Oracle, Workload, draw
from jobs.demo.leg_pb2 import Leg
from persistence.kafka import KafkaSettings

TOPIC = "legs"
CHUNK = 50_000


def chunks_of(messages, first):
    """Messages of one partition, as `aggregations.engine.fetch` hands them over."""
    for start in range(0, len(messages), CHUNK):
        part = messages[start : start + CHUNK]
        offsets = range(first + start, first + start + len(part))
        yield pa.table(
            {
                "key": pa.array([one["key"] for one in part], pa.binary()),
                "value": pa.array([one["value"] for one in part], pa.binary()),
                "topic": pa.array([TOPIC] * len(part)),
                "partition": pa.array([0] * len(part), pa.int32()),
                "offset": pa.array(offsets, pa.int64()),
                "timestamp": pa.array([1_700_000_000_000] * len(part), pa.timestamp("ms")),
            }
        )


def worked(run, flow, urls, chunks):
    """One batch by one task; returns its report and CPU seconds."""
    progress = RunProgress(
        ref=run.ref, epoch=run.epoch, batch=run.batch, known=run.known, topic_ids={TOPIC: "T"}, ledger=run.ledger
    )
    options = RunOptions(kafka=KafkaSettings("nowhere:1"), stores=urls)
    work, path = Work(Job(flow, options, progress, Attempt(routes=4, asked=("raw",)))), columnar_path()
    gc.disable()
    begun = time.process_time()
    writes, _ = path.fold(work, flow.stages[0], path.read(work, chunks))
    spent = time.process_time() - begun
    gc.enable()
    assert not work.collector.dead
    stage = flow.stages[0]
    run.stores[stage.name].save(run.stage_ref(stage), writes, epoch=run.epoch, batch=run.batch)
    manifest = run.following({}, {TOPIC: "T"}, {}, work.collector.changes)
    for name, _ in run.distinct_stores():
        run.save_manifest(name, manifest)
    run.advanced(manifest)
    return work.report, spent


def emitted(element, state):
    return [state] if element.offset % 3 == 0 else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="records of a batch")
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--resent", type=float, default=0.05)
    parser.add_argument("--fold", choices=FOLDS, default="python")
    parser.add_argument("--emit", action="store_true", help="a function passes on the state of every third event")
    parser.add_argument("--profile", action="store_true", help="print where the last batch spends its time")
    args = parser.parse_args()
    RootTopics._ask = lambda *_: None  # there is no broker to ask
    flow = Flow("bench").source(Topic(TOPIC, Leg))
    flow = flow.aggregate("aircraft", key="tail", fold=FOLDS[args.fold], emit=emitted if args.emit else None)
    urls = bind(flow, {}, "memory://bench")
    run = begin(flow, urls)
    oracle = Oracle(args.keys)
    messages = draw(Workload(args.rows * args.batches, args.keys, args.resent), TOPIC, oracle)
    profile = cProfile.Profile()
    for number in range(args.batches):
        part = list(islice(messages, args.rows))
        chunks = list(chunks_of(part, number * args.rows))
        if args.profile and number == args.batches - 1:
            profile.enable()
        report, spent = worked(run, flow, urls, chunks)
        profile.disable()
    stage = flow.stages[0]
    ref = run.stage_ref(stage)
    states = {key.decode(): state_of(stored, ref, key).fold for key, stored in run.stores["aircraft"].scan(ref)}
    found = {
        "key": list(states),
        "count": [one["legs"] for one in states.values()],
        "sum": [one["minutes"] for one in states.values()],
        "max": [one["worst"] for one in states.values()],
    }
    assert pl.DataFrame(found, schema=COLUMNS).sort("key").equals(oracle.result())
    phases = {name: round(seconds / args.rows * 1e6, 2) for name, seconds in report.seconds.items()}
    print(json.dumps({"us_per_event": round(spent / args.rows * 1e6, 2), **phases}))
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()

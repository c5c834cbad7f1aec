"""CPU of each aggregate on the vectorised path, microseconds per event, without Spark and Kafka.

    python benchmarks/aggregates.py [--events 400000] [--keys 10000] [--batches 4] [--only variance,emit] [--json]

One stage with `count()` and the aggregate, keyed by the aircraft: the fold, and load and persist together, in a memory
store. `emit` adds a second stage that counts what the first one emits. Counts are compared with the number of distinct events.
"""

import argparse
import json

import polars as pl

from aggregations import (
    Emit,
    Fields,
    Flow,
    Topic,
    approximate_distinct,
    collect,
    count,
    first,
    histogram,
    maximum,
    mean,
    quantiles,
    standard_deviation,
    top,
    total,
    variance,
)
from aggregations.run.states import state_of
from benchmarks.columns import Bench, batched, tables
from benchmarks.workload import Oracle, Workload, draw
from jobs.demo.leg_pb2 import Leg

AGGREGATES = {
    "count": count(),
    "count where": count(where=pl.col("arr_delay") > 15),
    "total": total("air_minutes"),
    "maximum": maximum("arr_delay"),
    "mean": mean("arr_delay"),
    "first": first("arr_delay"),
    "variance": variance("arr_delay"),
    "variance of floats": variance(pl.col("arr_delay") / 7),
    "standard_deviation": standard_deviation("arr_delay"),
    "histogram": histogram("arr_delay", [0, 15, 60, 180]),
    "collect": collect("arr_delay", 10),
    "approximate_distinct": approximate_distinct("air_minutes"),
    "quantiles": quantiles("arr_delay"),
    "top": top("carrier", 3),
}
EMITS = {
    "emit total": Emit(carrier="carrier", m="new.m"),
    "emit changed": Emit(carrier="carrier", worst="new.worst").changed(),
    "emit mean": Emit(carrier="carrier", mean="new.mean"),
    "emit function": lambda element, state: [{"carrier": element["carrier"], "m": state["m"]}],
}


def flow_of(name):
    flow = Flow("bench").source(Topic("legs", payload=Leg))
    if name in AGGREGATES:
        return flow.aggregate("aircraft", "tail", Fields(n=count(), x=AGGREGATES[name]))
    fold = Fields(n=count(), m=total("air_minutes"), worst=maximum("arr_delay"), mean=mean("air_minutes"))
    flow = flow.aggregate("aircraft", "tail", fold, emit=EMITS[name])
    return flow.aggregate("carriers", "carrier", Fields(n=count()), co_partitioned=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    oracle = Oracle(options.keys)
    messages = list(draw(Workload(options.events, options.keys, 0.0), "legs", oracle))
    unique = int(oracle.result()["count"].sum())
    size = -(-len(messages) // options.batches)
    parts = [list(tables(part, i * size)) for i, part in enumerate(batched(messages, size))]
    names = options.only.split(",") if options.only else [*AGGREGATES, *EMITS]
    for number, name in enumerate(names):
        warm = Bench(f"memory://warm-{number}", flow_of(name))
        warm.process([parts[0][0].slice(0, 100)], "warm")
        bench = Bench(f"memory://aggregates-{number}", flow_of(name))
        for part in parts:
            bench.process(part, "new")
        ref, store = bench.run.ref.stage("aircraft"), bench.run.stores["aircraft"]
        found = [(len(stored.value), state_of(stored, ref, key).fold["n"]) for key, stored in store.scan(ref)]
        folded = sum(n for _, n in found)
        assert folded == unique, (name, folded, unique)
        spent = {
            phase: round(bench.seconds["new", "aircraft", phase] * 1e6 / options.events, 3)
            for phase in ("fold", "load", "persist")
        }
        bytes_per_state = round(sum(length for length, _ in found) / len(found))
        if options.json:
            print(json.dumps({"aggregate": name, "us_per_event": spent, "bytes_per_state": bytes_per_state}))
            continue
        io = spent["load"] + spent["persist"]
        print(f"{name:22} fold {spent['fold']:8.3f} us   load, persist {io:7.3f} us   state {bytes_per_state:6,} bytes")


if __name__ == "__main__":
    main()

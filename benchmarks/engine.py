"""Events a second of the engine, on Spark or in one process, and what they cost.

    python benchmarks/engine.py [--events 2000000] [--keys 10000] [--resent 0.05] [--store sqlite|redis|URL]
        [--fold fields|python] [--runner spark|local ...] [--master MASTER ...] [--rounds 1] [--json]

A topic of four partitions is filled with envelopes of one republish hop, part of them re-sent at new offsets. The
engine reads it with a flow of one stage, keyed as the topic is. Every batch but the first is warm. The sum of what was
folded must be the number of unique inputs. With `redis` a server of its own is started and its CPU counted. Memory is
the most that each process ever had resident. With a master such as `local-cluster[2,1,1024]`, executors are processes
of their own, and the store must be Redis. With several runners, masters or rounds each reads the topic in turn, into
states of its own; the driver of `local` is its only process.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
from contextlib import closing, nullcontext
from itertools import pairwise

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Topic
from aggregations.engine.options import RunOptions
from aggregations.local import run_local
from aggregations.run.states import state_of
from aggregations.spark import run_flow
from aggregations.spark.session import session
from benchmarks import processes
from benchmarks.workload import PARTITIONS, Workload, fill
from jobs import stack
from jobs.demo.leg_pb2 import Leg
from persistence.kafka import KafkaSettings, Topics
from persistence.protocol import FlowRef
from persistence.registry import open_store


class Legs:
    """Count, sum and maximum, in plain Python."""

    def zero(self):
        return {"legs": 0, "minutes": 0, "worst": None}

    def fold(self, state, element):
        delay = element["arr_delay"]
        state["legs"] += 1
        state["minutes"] += element["air_minutes"]
        if state["worst"] is None or delay > state["worst"]:
            state["worst"] = delay
        return state


FOLDS = {
    "fields": Fields(legs=count(), minutes=total("air_minutes"), worst=maximum("arr_delay")),
    "python": Legs(),
}


def flow_of(topic, fold="fields", name="bench"):
    return Flow(name).source(Topic(topic, payload=Leg)).aggregate("aircraft", key="tail", fold=FOLDS[fold])


def parts_of(servers):
    """Process ids by part: servers, the driver's JVM, workers and the daemon that forks them."""
    found = {name: [pid] for name, pid in servers.items()} | {"jvm": [], "workers": []}
    for child in processes.children(os.getpid()):
        if child not in servers.values():
            for part, pids in processes.parts(child).items():
                found.setdefault(part, []).extend(pids)
    return found


def spent(servers):
    """CPU seconds so far by part."""
    times = os.times()
    return processes.spent(parts_of(servers)) | {"driver": times.user + times.system}


def memory(servers):
    """Peak resident MB by part; of workers, which share much of theirs, the largest."""
    return processes.memory(parts_of(servers)) | {"driver": processes.peak(os.getpid())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--resent", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=500_000, help="records of a batch")
    parser.add_argument("--store", default="sqlite", help="sqlite, redis, or a URL")
    parser.add_argument("--fold", choices=FOLDS, default="fields", help="built-in fields, or a class in Python")
    parser.add_argument("--runner", choices=["spark", "local"], nargs="+", default=["spark"])
    parser.add_argument("--master", nargs="+", default=[None], help="Spark's masters; a local one if not given")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all runners and masters")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    say = (lambda *words: None) if args.json else print
    conf = {"spark.driver.memory": "2g"}
    with stack.ephemeral(kafka=True, redis=args.store == "redis", heap_mb=1024) as servers:
        settings = KafkaSettings(servers.kafka)
        pids = {one.name: one.pid for one in servers.servers}
        topic = f"bench-{uuid.uuid4().hex[:8]}"
        Topics(settings).create(topic, PARTITIONS)
        Topics(settings).create(f"{topic}.dlq", 1)
        begin = time.perf_counter()
        unique = fill(settings, topic, Workload(args.events, args.keys, args.resent), lambda done: None).unique
        say(f"filled with {args.events:,} envelopes, {unique:,} unique, in {time.perf_counter() - begin:.0f} s")
        own = {
            "sqlite": f"sqlite://{tempfile.mkdtemp()}/bench.db",
            "redis": servers.redis if servers.find("redis") else "",
        }
        url = own.get(args.store, args.store)
        runs = [("local", None)] * ("local" in args.runner) + [
            ("spark", one) for one in args.master if "spark" in args.runner
        ]
        for number, (runner, master) in enumerate(runs * args.rounds):
            with session("bench", master=master, conf=conf) if runner == "spark" else nullcontext():
                flow = flow_of(topic, args.fold, f"bench-{number}")
                on_spark = {"master": master, "conf": conf} if runner == "spark" else {}
                result = measure(flow, runner, args, settings, pids, url, on_spark) | {"unique": unique}
            assert result["folded"] == unique, f"folded {result['folded']}, unique {unique}"
            print(json.dumps(result) if args.json else json.dumps(result, indent=2), flush=True)


def measure(flow, runner, args, settings, pids, url, on_spark):
    """Run the flow on one runner; return its figures."""
    marks = [(time.perf_counter(), spent(pids), 0)]

    def note(report):
        marks.append((time.perf_counter(), spent(pids), report.records))

    report = {"spark": run_flow, "local": run_local}[runner](
        flow,
        RunOptions(
            kafka=settings,
            stores=url,
            dead_letters=f"{flow.inputs[0].topic.name}.dlq",
            until_caught_up=True,
            max_records=args.batch,
        ),
        progress=note,
        **on_spark,
    )
    with closing(open_store(url)) as store:
        ref = FlowRef(flow.name).stage("aircraft")
        folded = sum(state_of(stored, ref, key).fold["legs"] for key, stored in store.scan(ref))
    rates, costs = [], []
    for (t0, c0, _), (t1, c1, rows) in pairwise(marks[1:]):
        if rows > args.batch // 2:
            rates.append(rows / (t1 - t0))
            costs.append({part: (c1[part] - c0[part]) * 1e6 / rows for part in c1})
    cost = {part: round(statistics.mean(one[part] for one in costs), 2) for part in costs[0]}
    return {
        "runner": runner,
        "master": on_spark.get("master"),
        "events": args.events,
        "folded": folded,
        "verdicts": dict(report.verdicts["aircraft"]),
        "engine_events_per_second": [round(rate) for rate in rates],
        "cpu_seconds_per_million": {**cost, "all": round(sum(cost.values()), 2)},
        "peak_resident_mb": memory(pids),
        "exact": True,
    }


if __name__ == "__main__":
    main()

"""CPU and time of a batch in which many sessions close, and of one in which they leave the store; without Spark and Kafka.

    python benchmarks/closing.py [--sessions 200000] [--store URL] [--json]

Each key has one session. A record that is an hour later closes all of them, so their states are loaded and published; a
record that is two days later removes them. Both are counted. Messages are made, but not sent.
"""

import argparse
import json
import tempfile
import time

from aggregations import Fields, Flow, Json, MemoryRunner, Record, Topic, bind, count, maximum, session

BEGIN_MS = 1_600_000_000_000
HOUR_MS = 3_600_000
KEYS = 10_000
"""Keys of one batch."""

topic = Topic("fastenings", Json({"screw": str, "torque": int, "at": int}), envelope=False, time="at")
flow = (
    Flow("closing")
    .source(topic)
    .aggregate("screw", "screw", Fields(attempts=count(), torque=maximum("torque")), window=session("2m"))
    .publish_states("closed", on="close")
)


def record(offset, later_ms=0):
    value = {"screw": f"screw-{offset}", "torque": offset % 50, "at": BEGIN_MS + later_ms}
    return Record("fastenings", 0, offset, b"k", json.dumps(value).encode(), timestamp_ms=value["at"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200_000)
    parser.add_argument("--store", help="URL; a new LMDB store otherwise")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runner = MemoryRunner(flow, bind(flow, {}, options.store or f"lmdb://{tempfile.mkdtemp()}/states"))
    for start in range(0, options.sessions, KEYS):
        runner.process(record(offset) for offset in range(start, min(start + KEYS, options.sessions)))
    found = {}
    for number, (name, later_ms) in enumerate([("publish", HOUR_MS), ("remove", 48 * HOUR_MS)]):
        cpu, wall = time.process_time(), time.perf_counter()
        runner.process([record(options.sessions + number, later_ms)])
        found[name] = {
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "seconds": round(time.perf_counter() - wall, 2),
        }
    # The record that closed the sessions has one of its own, which the next record closes.
    assert len(runner.outputs) == options.sessions + 1, len(runner.outputs)
    assert runner.report.removed["screw"] >= options.sessions, runner.report.removed
    if options.json:
        print(json.dumps({"sessions": options.sessions, **found}))
        return
    for name, spent in found.items():
        print(f"{name:8} {spent['cpu_seconds']:6.2f} s CPU  {spent['seconds']:6.2f} s")


if __name__ == "__main__":
    main()

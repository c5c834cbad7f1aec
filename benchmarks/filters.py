"""CPU of a worker per event behind each filter, beside the plain aggregation; without Spark, broker and disk.

    python benchmarks/filters.py [--rows 40000] [--keys 10000] [--batches 6] [--filters ...] [--profile] [--json]

The shapes of `benchmarks/shapes.py`. Batches of one partition go through the task code of the engine: decode, steps,
load, fold and persist, to a store in memory. Shapes take turns, batch by batch. Figures are medians of the batches
after the first: microseconds of CPU per event, of which in the filter, and the rate relative to the plain aggregation.
The sum of what was folded must be the number of distinct events.
"""

import argparse
import cProfile
import json
import pstats
import statistics

from aggregations.engine.roots import RootTopics
from aggregations.run.states import state_of
from benchmarks.columns import Bench, batched, tables
from benchmarks.shapes import FILTERS, SHAPES, made
from benchmarks.workload import Oracle, Workload, draw

PER_MS = 12
"""Records of a millisecond: an interval of two seconds holds 24,000."""


class Shape:
    """A flow, its records and its figures."""

    def __init__(self, name, args):
        self.name = name
        oracle = Oracle(args.keys)
        workload = Workload(args.rows * args.batches, args.keys, **SHAPES[name])
        parts = batched(draw(workload, "legs", oracle), args.rows)
        self.batches = [list(tables(part, i * args.rows, PER_MS)) for i, part in enumerate(parts)]
        self.unique = int(oracle.result()["count"].sum())
        self.bench = Bench(f"memory://{name.replace(' ', '-')}", made(name, "legs"))

    def folded(self):
        """How many events the states contain."""
        run = self.bench.run
        stage = run.ref.stage("aircraft")
        return sum(state_of(stored, stage, key).fold["legs"] for key, stored in run.stores["aircraft"].scan(stage))

    def figures(self, rows):
        """Microseconds per event: the whole, and the filter's load, fold and persist."""
        seconds = self.bench.seconds
        of = {number for number, _, _ in seconds if number > 0}
        whole = statistics.median(seconds[number, "", "all"] for number in of)
        phases = ("load", "fold", "persist")
        alone = statistics.median(sum(seconds[number, "filter", phase] for phase in phases) for number in of)
        return whole * 1e6 / rows, alone * 1e6 / rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000, help="records of a batch")
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--filters", default=",".join(FILTERS), help="some of: %(default)s")
    parser.add_argument(
        "--profile", action="store_true", help="print where the last batch behind the last filter spends its time"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    RootTopics._ask = lambda *_: None  # there is no broker to ask
    shapes = [Shape(name, args) for name in ("plain", *args.filters.split(","))]
    profile = cProfile.Profile()
    for number in range(args.batches):
        for shape in shapes:
            profiled = args.profile and number == args.batches - 1 and shape is shapes[-1]
            if profiled:
                profile.enable()
            shape.bench.process(shape.batches[number], number)
            profile.disable()
    result, plain = {}, 0.0
    for shape in shapes:
        assert shape.folded() == shape.unique, f"{shape.name}: folded {shape.folded()} of {shape.unique}"
        whole, alone = shape.figures(args.rows)
        plain = plain or whole
        result[shape.name] = {"us": round(whole, 2), "in_filter": round(alone, 2), "by_plain": round(plain / whole, 2)}
    told = {"rows": args.rows, "keys": args.keys, "exact": True, "shapes": result}
    print(json.dumps(told, indent=None if args.json else 2))
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()

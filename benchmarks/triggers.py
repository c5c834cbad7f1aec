"""The start of `headwater run`, triggers of few records, and what a run costs while nothing comes.

    python benchmarks/triggers.py [--runner spark|local ...] [--rounds 3] [--records 1000] [--batches 20]
        [--seconds 30] [--trigger 1s] [--json]

A topic of four partitions holds `--records` events. Each round starts `headwater run` and measures the seconds until
they are committed. Then as many again are produced, `--batches` times: the seconds from the producer's last
acknowledgement to the commit, with a trigger of 10 ms. Then a run with `--trigger` is started, and after it has caught
up, CPU time of all its processes over `--seconds` seconds without a record, by the number of triggers. The states must
hold each event once.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from itertools import islice
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Committed, compare
from benchmarks.peers.base import Task
from benchmarks.peers.headwater import Headwater
from benchmarks.recovery import kill, next_commit, started
from benchmarks.workload import PARTITIONS, Filled, Oracle, Workload, draw
from jobs import stack
from jobs.settings import seconds as seconds_of
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics

_SETTLE_SECONDS = 5.0


class Triggered(Headwater):
    """A run that goes on, on one runner and with one trigger."""

    def __init__(self, runner, trigger):
        super().__init__("lmdb")
        self._more = ["--runner", runner, "--trigger", trigger]

    def command(self, task):
        words = super().command(task)
        if "local" in self._more:
            words = words[: words.index("--conf")] + words[words.index("--conf") + 2 :]
        return words + self._more


def cpu(pid):
    return sum(processes.spent(processes.parts(pid)).values())


def one_round(runner, settings, home, args):
    run = f"triggers-{uuid.uuid4().hex[:8]}"
    Topics(settings).create(run, PARTITIONS)
    workload = Workload(10**9, 10_000, seed=args.seed)
    oracle = Oracle(workload.keys)
    messages = draw(workload, run, oracle)
    task = Task(run, Filled(run, workload, 0, 0.0, None), settings.bootstrap, "", home, 1_000_000)
    busy, idle = Triggered(runner, "10ms"), Triggered(runner, args.trigger)
    for topic, partitions in busy.topics(task).items():
        Topics(settings).create(topic, partitions)
    with AcknowledgedProducer(settings) as producer, Committed(settings, run, run) as committed:

        def produce():
            producer.send_many(run, list(islice(messages, args.records)))
            producer.flush()

        def caught_up(child, goal, begin):
            while (before := committed()) < goal:
                next_commit(committed, child, before, task)
            return time.perf_counter() - begin

        produce()
        child = started(busy, task, forever=True)
        start = caught_up(child, args.records, time.perf_counter())
        seconds = []
        for number in range(args.batches):
            produce()
            seconds.append(caught_up(child, (number + 2) * args.records, time.perf_counter()))
            time.sleep(0.2)
        kill(child)
        produce()
        child = started(idle, task, forever=True)
        caught_up(child, (args.batches + 2) * args.records, time.perf_counter())
        time.sleep(_SETTLE_SECONDS)
        before, begin = cpu(child.pid), time.perf_counter()
        time.sleep(args.seconds)
        spent = (cpu(child.pid) - before) / (time.perf_counter() - begin) * seconds_of(args.trigger, "--trigger")
        kill(child)
    if difference := compare(idle.result(task), oracle.result()).keys:
        sys.exit(f"{difference} keys are wrong")
    return {"start": start, "records": statistics.median(seconds), "idle_cpu": spent}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=["spark", "local"], nargs="+", default=["spark", "local"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--trigger", default="1s")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {runner: [] for runner in args.runner}
    with tempfile.TemporaryDirectory() as home, stack.ephemeral(kafka=True, heap_mb=1024) as servers:
        for number in range(args.rounds):
            for runner, rounds in found.items():
                place = Path(home, f"{runner}-{number}")
                place.mkdir()
                rounds.append(one_round(runner, KafkaSettings(servers.kafka), place, args))
                if not args.json:
                    told = {name: round(value, 3) for name, value in rounds[-1].items()}
                    print(f"{runner}, round {number + 1}: {told}", flush=True)
    told = {
        runner: {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}
        for runner, rounds in found.items()
    }
    print(json.dumps(told) if args.json else json.dumps(told, indent=2))


if __name__ == "__main__":
    main()

"""Seconds from a SIGKILL of a run to the next committed batch.

    python benchmarks/recovery.py [--kills 30] [--store lmdb|sqlite|redis] [--rate 5000] [--seed 7] [--json]

`headwater run` reads a topic of four partitions to which a producer appends all the time. Again and again it is killed
with all of its processes, at a random moment after its first commit, and started again at once. The time counts from the kill to
the first commit after it, as offsets of the consumer group. At the end the states must hold each event once.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from itertools import islice
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Committed, compare
from benchmarks.peers.base import Task
from benchmarks.peers.headwater import Headwater
from benchmarks.workload import PARTITIONS, Filled, Oracle, Workload, draw
from jobs import stack
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics

_PAUSE_SECONDS = 0.2
_LONGEST_SECONDS = 120.0


class Feed(threading.Thread):
    """Appends events to the topic at a steady rate until it is told to stop."""

    def __init__(self, settings, topic, workload, rate):
        super().__init__(daemon=True)
        self.oracle, self.sent, self.error = Oracle(workload.keys), 0, None
        self._settings, self._topic, self._rate = settings, topic, rate
        self._messages = draw(workload, topic, self.oracle)
        self._stop_it = threading.Event()

    def run(self):
        try:
            with AcknowledgedProducer(self._settings) as producer:
                while not self._stop_it.wait(_PAUSE_SECONDS):
                    some = list(islice(self._messages, int(self._rate * _PAUSE_SECONDS)))
                    producer.send_many(self._topic, some)
                    producer.flush()
                    self.sent += len(some)
        except Exception as error:
            self.error = error

    def finish(self):
        self._stop_it.set()
        self.join()
        if self.error:
            raise self.error


def kill(child):
    """Kill a run with everything that it started."""
    pids = [pid for some in processes.parts(child.pid).values() for pid in some]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def started(peer, task, *, forever):
    """Start the run; `forever`, or until it has caught up."""
    words = [word for word in peer.command(task) if not (forever and word == "--until-caught-up")]
    with task.log.open("ab") as log:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **peer.environment(task)}
        )


def next_commit(committed, child, before, task):
    """Wait for a commit beyond `before`."""
    begin = time.perf_counter()
    while committed() <= before:
        if child.poll() is not None or time.perf_counter() - begin > _LONGEST_SECONDS:
            sys.exit(f"no commit; the run's log ends with: {task.log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--store", choices=("lmdb", "sqlite", "redis"), default="lmdb")
    parser.add_argument("--rate", type=int, default=5_000, help="events per second that are produced")
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    chance, peer = random.Random(args.seed), Headwater(args.store)
    with (
        tempfile.TemporaryDirectory() as home,
        stack.ephemeral(kafka=True, redis=args.store == "redis", heap_mb=1024) as servers,
    ):
        settings, run = KafkaSettings(servers.kafka), f"recovery-{uuid.uuid4().hex[:8]}"
        Topics(settings).create(run, PARTITIONS)
        workload = Workload(10**9, args.keys, seed=args.seed)
        server = servers.redis if args.store == "redis" else ""
        task = Task(run, Filled(run, workload, 0, 0.0, None), servers.kafka, server, Path(home), 1_000_000)
        for topic, partitions in peer.topics(task).items():
            Topics(settings).create(topic, partitions)
        feed = Feed(settings, run, workload, args.rate)
        feed.start()
        seconds = []
        with Committed(settings, run, run) as committed:
            child = started(peer, task, forever=True)
            next_commit(committed, child, 0, task)
            for number in range(args.kills):
                time.sleep(chance.uniform(0.2, 3.0))
                kill(child)
                before, begin = committed(), time.perf_counter()
                child = started(peer, task, forever=True)
                next_commit(committed, child, before, task)
                seconds.append(time.perf_counter() - begin)
                if not args.json:
                    print(f"kill {number + 1}: {seconds[-1]:.1f} s", flush=True)
            feed.finish()
            kill(child)
            started(peer, task, forever=False).wait()
        difference = compare(peer.result(task), feed.oracle.result())
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    told = {
        "store": args.store,
        "kills": args.kills,
        "events": feed.sent,
        "seconds": {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "max": round(max(seconds), 2)},
        "wrong_keys": difference.keys,
    }
    print(json.dumps(told) if args.json else json.dumps(told, indent=2))
    sys.exit(1 if difference.keys else 0)


if __name__ == "__main__":
    main()

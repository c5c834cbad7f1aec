"""The republisher beside a bare consume-produce loop, on one broker, in one run.

    python benchmarks/republish.py [--bootstrap HOST:PORT] [--messages 1000000] [--rounds 3] [--only RUNNER ...] [--json]

Without an address it starts a broker of its own. A topic of 4 partitions is filled with envelopes of
100-byte payloads, keys and one hop; each runner then drains it in a process of its own. The rounds of
all runners take turns, so that what else the machine does meets them alike.

| runner | does |
|---|---|
| bare | consume, produce as it came, flush and commit every 50,000: no envelope is looked at |
| bare-tuned | the same with `produce_batch`, and fetches that do not pause (`fetch.queue.backoff.ms`) |
| republish | `Republisher(identity)`: checked, one hop more |
| one-output | `Republisher`: one output of each input, with a new payload and key |
| fan-out | the same with two outputs |
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import uuid
from contextlib import nullcontext
from itertools import pairwise

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from envelope import Envelope, Hop, decode, encode
from jobs import stack
from jobs.republish import OutputRecord, Republisher, identity
from persistence.kafka import AcknowledgedProducer, KafkaSettings, Topics

PARTITIONS = 4
BATCH = 50_000
RUNNERS = ("bare", "bare-tuned", "republish", "one-output", "fan-out")


def fill(settings, topic, messages):
    hop = Hop("root", 1, 0, via="first", index=0, count=1, topic_id="PxoY3ACJQLqZcIuB3RIpew", leader_epoch=0)
    with AcknowledgedProducer(settings) as producer:
        for start in range(0, messages, 1000):
            batch = []
            for i in range(start, min(start + 1000, messages)):
                key = b"N%05d" % (i % 10_000)
                envelope = Envelope(b"%0100d" % i, (hop,), key=key, event_time_us=1_700_000_000_000_000 + i)
                batch.append({"key": key, "value": encode(envelope)})
            producer.send_many(topic, batch)
        producer.flush()


def bare(settings, source, target, messages, *, tuned):
    consumer = Consumer(
        settings.client(
            group_id=uuid.uuid4().hex,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            queued_min_messages=100_000,
            fetch_wait_max_ms=100,
            **({"fetch_queue_backoff_ms": 20} if tuned else {}),
        )
    )
    consumer.subscribe([source])
    producer = Producer(
        settings.client(
            enable_idempotence=True,
            linger_ms=5,
            compression_type="lz4",
            partitioner="murmur2_random",
            queue_buffering_max_messages=500_000,
        )
    )
    done = waiting = 0
    while done < messages:
        records = consumer.consume(1000, 1)
        if tuned:
            producer.produce_batch(target, [{"key": record.key(), "value": record.value()} for record in records])
        else:
            for record in records:
                producer.produce(target, record.value(), record.key())
        producer.poll(0)
        done += len(records)
        waiting += len(records)
        if waiting >= BATCH or done == messages:
            producer.flush()
            consumer.commit(asynchronous=False)
            waiting = 0
    consumer.close()


def outputs(count):
    """A transform that makes `count` outputs of each input, with new payloads and keys."""

    def transform(record):
        payload = record.payload
        return [OutputRecord(payload[:50] + b"%050d" % i, key=b"%d" % (record.offset % 1000)) for i in range(count)]

    return transform


TRANSFORMS = {"republish": identity, "one-output": outputs(1), "fan-out": outputs(2)}


def work(runner, settings, source, target, messages):
    """One runner's work, in a process of its own: seconds and CPU seconds."""
    began, cpu = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    if runner.startswith("bare"):
        bare(settings, source, target, messages, tuned=runner == "bare-tuned")
    else:
        republisher = Republisher(
            TRANSFORMS[runner],
            source=source,
            target=target,
            name="bench",
            group=uuid.uuid4().hex,
            settings=settings,
            batch_size=BATCH,
        )
        assert republisher.run(until_caught_up=True).consumed == messages
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": time.perf_counter() - began,
        "cpu": used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime,
    }


def check(settings, runner, target, messages):
    """Every message is there, and those of the republisher carry a whole chain."""
    marks = Topics(settings).marks([target])
    assert sum(mark.high for mark in marks.values()) == messages * (2 if runner == "fan-out" else 1)
    consumer = Consumer(settings.client(group_id=uuid.uuid4().hex))
    consumer.assign([TopicPartition(target, 0, OFFSET_BEGINNING)])
    sample = [decode(record.value()) for record in consumer.consume(1000, 10)]
    consumer.close()
    assert {len(envelope.chain) for envelope in sample} == {1 if runner.startswith("bare") else 2}
    if runner == "republish":
        for one, other in pairwise(envelope.chain[-1] for envelope in sample):
            assert (one.partition, one.offset) < (other.partition, other.offset) or one.partition != other.partition


def measure(settings, messages, rounds, runners):
    topics = Topics(settings)
    source = f"bench-{uuid.uuid4().hex[:8]}"
    topics.create(source, PARTITIONS)
    fill(settings, source, messages)
    results = {runner: [] for runner in runners}
    for number in range(rounds):
        for runner in runners:
            target = f"{source}-{runner}-{number}"
            topics.create(target, PARTITIONS)
            command = [sys.executable, __file__, "--work", runner, source, target, "--messages", str(messages)]
            command += ["--bootstrap", settings.bootstrap]
            done = subprocess.run(
                command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}
            )
            results[runner].append(json.loads(done.stdout))
            check(settings, runner, target, messages)
            topics.delete([target])
    topics.delete([source])
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", help="broker; one is started without it")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=RUNNERS, default=RUNNERS, help="runners; shares are of the first")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        runner, source, target = arguments.work
        print(json.dumps(work(runner, KafkaSettings(arguments.bootstrap), source, target, arguments.messages)))
        return
    with nullcontext() if arguments.bootstrap else stack.ephemeral() as state:
        address = arguments.bootstrap or state.kafka
        results = measure(KafkaSettings(address), arguments.messages, arguments.rounds, arguments.only)
    best = {runner: min(runs, key=lambda run: run["seconds"]) for runner, runs in results.items()}
    rows = {
        runner: {
            "messages_per_second": round(arguments.messages / best[runner]["seconds"]),
            "median": round(arguments.messages / statistics.median(run["seconds"] for run in runs)),
            "cpu_seconds_per_million": round(best[runner]["cpu"] / arguments.messages * 1e6, 2),
            "share": round(best[arguments.only[0]]["seconds"] / best[runner]["seconds"], 3),
        }
        for runner, runs in results.items()
    }
    if arguments.json:
        print(json.dumps({"messages": arguments.messages, "rounds": arguments.rounds, "runners": rows}))
        return
    print(f"{'runner':12}{'best/s':>10}{'median/s':>10}{'CPU-s/million':>15}{'share':>9}")
    for runner, row in rows.items():
        print(
            f"{runner:12}{row['messages_per_second']:>10,}{row['median']:>10,}"
            f"{row['cpu_seconds_per_million']:>15}{row['share']:>9}"
        )


if __name__ == "__main__":
    main()

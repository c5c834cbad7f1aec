"""The Cassandra store beside plain writes and single transactions of the same server, in the same run.

    headwater stack up --cassandra
    python benchmarks/cassandra_store.py cassandra://127.0.0.1:9042/bench?replication=1 [--json]

Creates the keyspace. Every round loads and replaces all keys, in calls as the engine makes them, and does
the same with each of the others; the rounds of all take turns, so that what else the machine does meets
them alike. The first round creates the states and warms the server up, and is not counted.

| row | is |
|---|---|
| conditional | `StateStore.save` and `.load`: many states a transaction |
| timestamp | the same in the mode `timestamp`: a look, then plain writes |
| plain | one prepared INSERT or SELECT per key, 64 at a time, without condition, epoch or version |
| single | one transaction per key (`IF version = ?`), 64 at a time; a tenth of the keys |
"""

import argparse
import json
import random
import statistics
import time
import uuid

from cassandra.concurrent import execute_concurrent_with_args

from persistence.cassandra import apply_schema, open_store
from persistence.cassandra.driver import connect
from persistence.cassandra.settings import CassandraSettings
from persistence.protocol import FlowRef, Write

CONCURRENCY = 64


class Store:
    def __init__(self, url, value):
        self.value = value
        self.store = open_store(url)
        self.stage = FlowRef(f"bench-{uuid.uuid4().hex[:8]}").stage("s")
        self.epoch = self.store.acquire_epoch(self.stage.flow_ref)
        self.batch = 0
        self.held = {}

    def load(self, keys):
        self.held = self.store.load(self.stage, keys)

    def save(self, keys):
        held = self.held
        self.batch += 1
        writes = [Write(key, held[key].version if key in held else 0, self.value) for key in keys]
        self.store.save(self.stage, writes, epoch=self.epoch, batch=self.batch)

    def close(self):
        assert set(self.held) and {state.value for state in self.held.values()} == {self.value}
        self.store.close()


class Plain:
    def __init__(self, settings, value):
        self.value = value
        self.cluster, self.session = connect(settings)
        table = f"{settings.keyspace}.plain"
        self.session.execute(f"CREATE TABLE IF NOT EXISTS {table} (key blob PRIMARY KEY, version bigint, value blob)")
        self.session.execute(f"TRUNCATE {table}")
        self.insert = self.session.prepare(f"INSERT INTO {table} (key, version, value) VALUES (?, ?, ?)")
        self.select = self.session.prepare(f"SELECT value FROM {table} WHERE key = ?")
        self.update = self.session.prepare(f"UPDATE {table} SET version = ?, value = ? WHERE key = ? IF version = ?")

    def load(self, keys):
        self.run(self.select, [(key,) for key in keys])

    def save(self, keys):
        self.run(self.insert, [(key, 1, self.value) for key in keys])

    def run(self, statement, parameters):
        return execute_concurrent_with_args(self.session, statement, parameters, concurrency=CONCURRENCY)

    def close(self):
        self.cluster.shutdown()


class Single(Plain):
    def __init__(self, settings, value):
        super().__init__(settings, value)
        self.versions = {}

    def load(self, keys):
        super().load(self.some(keys))

    def save(self, keys):
        keys = self.some(keys)
        known = [(key, self.versions.get(key)) for key in keys]
        done = self.run(self.update, [((version or 0) + 1, self.value, b"s" + key, version) for key, version in known])
        assert all(result.was_applied for _, result in done)
        self.versions |= {key: (version or 0) + 1 for key, version in known}

    @staticmethod
    def some(keys):
        return keys[::10]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=200)
    parser.add_argument("--call", type=int, default=2_500, help="keys per call: one partition's share of a batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    apply_schema(args.url)
    settings = CassandraSettings.parse(args.url)
    keys = [b"N%07d" % i for i in range(args.keys)]
    random.Random(1).shuffle(keys)
    calls = [keys[i : i + args.call] for i in range(0, len(keys), args.call)]
    value = b"{".ljust(args.bytes - 1, b"x") + b"}"
    separator = "&" if "?" in args.url else "?"
    subjects = {
        "conditional": Store(args.url, value),
        "timestamp": Store(f"{args.url}{separator}mode=timestamp", value),
        "plain": Plain(settings, value),
        "single": Single(settings, value),
    }
    rates = {name: ([], []) for name in subjects}
    for _ in range(args.rounds + 1):
        for name, subject in subjects.items():
            weight = 0.1 if name == "single" else 1
            saving = loading = 0.0
            for call in calls:  # load before save, as the engine does
                start = time.perf_counter()
                subject.load(call)
                loaded = time.perf_counter()
                subject.save(call)
                loading += loaded - start
                saving += time.perf_counter() - loaded
            rates[name][0].append(args.keys * weight / loading / 1000)
            rates[name][1].append(args.keys * weight / saving / 1000)
    for subject in subjects.values():
        subject.close()
    result = {
        name: {what: round(statistics.median(some[1:]), 2) for what, some in zip(("load", "save"), both, strict=True)}
        for name, both in rates.items()
    }
    if args.json:
        print(json.dumps({"keys": args.keys, "bytes": args.bytes, "call": args.call, "thousand_per_second": result}))
        return
    print(f"thousand keys per second: {args.keys} keys, {args.bytes} bytes, {args.call} keys a call")
    for name, row in result.items():
        print(f"{name:12} load {row['load']:>8}  save {row['save']:>8}")


if __name__ == "__main__":
    main()

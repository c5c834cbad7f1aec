"""Conditional writes and loads of each store, beside plain writes of the same server in the same run.

    python benchmarks/stores.py memory://bench sqlite:///tmp/bench.db lmdb:///tmp/bench redis://127.0.0.1:6379 [--json]

Every round loads and replaces all keys, in calls as the engine makes them. The first round creates the states and
is not counted. `plain` writes and reads the same bytes without condition, epoch or version: executemany upserts for
SQLite, putmulti and getmulti for LMDB, MSET and MGET for Redis.
"""

import argparse
import json
import random
import sqlite3
import statistics
import time
import uuid
from urllib.parse import urlsplit

from persistence.protocol import FlowRef, Write
from persistence.registry import open_store


class Conditional:
    """The store, through its own interface."""

    def __init__(self, url, value):
        self.store = open_store(url)
        self.value = value
        flow = FlowRef(f"bench-{uuid.uuid4().hex[:8]}")
        self.stage, self.epoch = flow.stage("s"), self.store.acquire_epoch(flow)
        self.batch = 0

    def load(self, keys):
        self.held = self.store.load(self.stage, keys)

    def save(self, keys):
        held = self.held
        writes = [Write(key, held[key].version if key in held else 0, self.value) for key in keys]
        self.batch += 1
        start = time.perf_counter()
        self.store.save(self.stage, writes, epoch=self.epoch, batch=self.batch)
        return time.perf_counter() - start


class PlainSqlite:
    def __init__(self, url, value):
        path = urlsplit(url).netloc + urlsplit(url).path + ".plain"
        self.value = value
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("CREATE TABLE IF NOT EXISTS plain (key BLOB PRIMARY KEY, value BLOB)")

    def load(self, keys):
        for i in range(0, len(keys), 512):
            part = keys[i : i + 512]
            marks = ",".join("?" * len(part))
            dict(self.connection.execute(f"SELECT key, value FROM plain WHERE key IN ({marks})", part).fetchall())

    def save(self, keys):
        rows = [(key, self.value) for key in keys]
        start = time.perf_counter()
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany(
            "INSERT INTO plain VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", rows
        )
        self.connection.execute("COMMIT")
        return time.perf_counter() - start


class PlainLmdb:
    def __init__(self, url, value):
        import lmdb

        self.environment = lmdb.open(urlsplit(url).netloc + urlsplit(url).path + ".plain", map_size=1 << 36)
        self.value = value

    def load(self, keys):
        with self.environment.begin() as transaction:
            dict(transaction.cursor().getmulti(sorted(keys)))

    def save(self, keys):
        rows = [(key, self.value) for key in sorted(keys)]
        start = time.perf_counter()
        with self.environment.begin(write=True) as transaction:
            transaction.cursor().putmulti(rows)
        return time.perf_counter() - start


class PlainRedis:
    def __init__(self, url, value):
        import redis

        self.client = redis.Redis.from_url(url.partition("?")[0])
        self.value = value
        self.prefix = uuid.uuid4().hex[:8].encode()

    def load(self, keys):
        self.client.mget([self.prefix + key for key in keys])

    def save(self, keys):
        start = time.perf_counter()
        self.client.mset({self.prefix + key: self.value for key in keys})
        return time.perf_counter() - start


PLAIN = {"sqlite": PlainSqlite, "lmdb": PlainLmdb, "redis": PlainRedis}


def measure(url, calls, value, rounds):
    """Thousand keys per second, by kind: the median of the rounds.

    The conditional and the plain way take turns, call by call, so that other work on the machine meets both.
    """
    kinds = {"": Conditional(url, value)}
    if plain := PLAIN.get(urlsplit(url).scheme):
        kinds["plain_"] = plain(url, value)
    times = {f"{kind}{verb}": [] for kind in kinds for verb in ("load", "save")}
    for number in range(rounds + 1):
        spent = dict.fromkeys(times, 0.0)
        for keys in calls:
            for kind, way in kinds.items():
                start = time.perf_counter()
                way.load(keys)
                spent[f"{kind}load"] += time.perf_counter() - start
                spent[f"{kind}save"] += way.save(keys)
        if number:  # the first round creates
            for name, seconds in spent.items():
                times[name].append(seconds)
    keys = sum(map(len, calls))
    return {name: round(keys / statistics.median(seconds) / 1000, 1) for name, seconds in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=300)
    parser.add_argument("--call", type=int, default=2_500, help="keys per call: one partition's share of a batch")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    keys = [b"N%07d" % i for i in range(args.keys)]
    random.Random(1).shuffle(keys)
    calls = [keys[i : i + args.call] for i in range(0, len(keys), args.call)]
    value = (b'{"schema":1,"state":{"legs":%d},' % args.keys).ljust(args.bytes - 1, b"x") + b"}"
    results = []
    for url in args.urls:
        results.append({"store": urlsplit(url).scheme} | measure(url, calls, value, args.rounds))
    if args.json:
        print(json.dumps({"keys": args.keys, "bytes": args.bytes, "call": args.call, "thousand_per_second": results}))
        return
    print(f"thousand keys per second: {args.keys} keys, {args.bytes} bytes, {args.call} keys a call")
    for row in results:
        print("  ".join(f"{name} {row[name]:>8}" for name in row))


if __name__ == "__main__":
    main()

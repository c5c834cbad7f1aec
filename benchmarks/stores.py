"""Conditional writes and loads of each store, beside plain writes of the same server in the same run.

    python benchmarks/stores.py memory://bench sqlite:///tmp/bench.db redis://127.0.0.1:6379 [--json]

Every round loads and replaces all keys, in calls as the engine makes them. The first round creates the states and
is not counted. `plain` writes and reads the same bytes without condition, term or version: executemany upserts for
SQLite, MSET and MGET for Redis.
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


def conditional(url, calls, value, rounds):
    """(seconds of a load, seconds of a save) per round."""
    store = open_store(url)
    flow = FlowRef(f"bench-{uuid.uuid4().hex[:8]}")
    stage, term = flow.stage("s"), store.acquire_term(flow)
    times = []
    for batch in range(rounds + 1):
        loading = saving = 0.0
        for keys in calls:
            start = time.perf_counter()
            held = store.load(stage, keys)
            loading += time.perf_counter() - start
            writes = [Write(key, held[key].version if key in held else 0, value) for key in keys]
            start = time.perf_counter()
            store.save(stage, writes, term=term, batch=batch)
            saving += time.perf_counter() - start
        times.append((loading, saving))
    store.close()
    return times[1:]


def plain_sqlite(url, calls, value, rounds):
    path = urlsplit(url).netloc + urlsplit(url).path + ".plain"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE IF NOT EXISTS plain (key BLOB PRIMARY KEY, value BLOB)")
    times = []
    for _ in range(rounds + 1):
        loading = saving = 0.0
        for keys in calls:
            start = time.perf_counter()
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO plain VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
                [(key, value) for key in keys],
            )
            connection.execute("COMMIT")
            saving += time.perf_counter() - start
            start = time.perf_counter()
            for i in range(0, len(keys), 512):
                part = keys[i : i + 512]
                marks = ",".join("?" * len(part))
                dict(connection.execute(f"SELECT key, value FROM plain WHERE key IN ({marks})", part).fetchall())
            loading += time.perf_counter() - start
        times.append((loading, saving))
    connection.close()
    return times[1:]


def plain_redis(url, calls, value, rounds):
    import redis

    client = redis.Redis.from_url(url)
    prefix = uuid.uuid4().hex[:8].encode()
    times = []
    for _ in range(rounds + 1):
        loading = saving = 0.0
        for keys in calls:
            names = [prefix + key for key in keys]
            start = time.perf_counter()
            client.mset(dict.fromkeys(names, value))
            saving += time.perf_counter() - start
            start = time.perf_counter()
            client.mget(names)
            loading += time.perf_counter() - start
        times.append((loading, saving))
    client.close()
    return times[1:]


PLAIN = {"sqlite": plain_sqlite, "redis": plain_redis}


def rate(seconds, keys):
    """Thousand keys per second, of the median round."""
    return round(keys / statistics.median(seconds) / 1000, 1)


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
        scheme = urlsplit(url).scheme
        loads, saves = zip(*conditional(url, calls, value, args.rounds), strict=True)
        row = {"store": scheme, "load": rate(loads, args.keys), "save": rate(saves, args.keys)}
        if plain := PLAIN.get(scheme):
            loads, saves = zip(*plain(url, calls, value, args.rounds), strict=True)
            row |= {"plain_load": rate(loads, args.keys), "plain_save": rate(saves, args.keys)}
        results.append(row)
    if args.json:
        print(json.dumps({"keys": args.keys, "bytes": args.bytes, "call": args.call, "thousand_per_second": results}))
        return
    print(f"thousand keys per second: {args.keys} keys, {args.bytes} bytes, {args.call} keys a call")
    for row in results:
        print("  ".join(f"{name} {row[name]:>8}" for name in row))


if __name__ == "__main__":
    main()

"""CPU of the columnar steps, per row: decode, judge, histories; new messages, some re-sent, all of them again.

    python benchmarks/columns.py [--rows 500000] [--keys 10000] [--resent 0.05] [--chunk 10000] [--json]

Envelopes of about 120 bytes with one hop. The message in them is a `Timestamp`.
`rekeyed` is a second stage of ten keys, whose lanes hold partitions.
Sums of folded messages are compared with the number of distinct ones.
"""

import argparse
import json
import random
import time

import numpy as np
import polars as pl
import pyarrow as pa
from google.protobuf.timestamp_pb2 import Timestamp

from aggregations.columns import Decoder, lanes_of, schema
from aggregations.columns.history import fold_histories
from aggregations.columns.judge import VERDICTS, judge
from aggregations.definition.source import Topic
from envelope import Envelope, Histories, Hop, encode

PARTITIONS = 4


def records(rows, keys, resent, rng, first):
    """Rows of one partition, as Spark's Kafka source gives them; some of them again a while later."""
    values, record_keys, roots = [], [], list(range(first, first + rows))
    for _ in range(int(rows * resent)):
        at = rng.randrange(rows - 1000)
        roots.insert(at + rng.randrange(1000), roots[at])
    for offset in roots:
        key = b"key-%05d" % (offset * 7919 % keys)
        hop = Hop("raw", offset % PARTITIONS, offset, via="rep", index=0, topic_id="abcdefghijklmnopqrstuv")
        payload = Timestamp(seconds=offset, nanos=offset % 500).SerializeToString()
        values.append(encode(Envelope(payload, (hop,), key=key, event_time_us=1_700_000_000_000_000 + offset)))
        record_keys.append(key)
    size = len(values)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array(record_keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "topic": pa.array(["legs"] * size),
            "partition": pa.array([1] * size, pa.int32()),
            "offset": pa.array(range(first, first + size), pa.int64()),
            "timestamp": pa.array([1_700_000_000_000] * size, pa.int64()),
        }
    )


class Clock:
    def __init__(self):
        self.micros = {}

    def timed(self, name, rows, action):
        start = time.process_time()
        result = action()
        self.micros[name] = round((time.process_time() - start) / rows * 1e6, 3)
        return result


def stage(clock, name, batch, keys, rekeyed, state):
    """Judge a batch and fold its histories; `state` is the histories by key."""
    names, numbers = np.unique(keys, return_inverse=True)
    names = names.tolist()
    signatures = batch.frame.get_column(schema.SIGNATURE).to_numpy()
    lanes, places = lanes_of(batch.signatures, signatures, rekeyed)
    histories = [state.get(key, Histories()) for key in names]
    exotic = batch.frame.get_column(schema.EXOTIC).to_numpy()
    arguments = (numbers, lanes, batch.positions, places, histories)
    rows = len(numbers)
    judged = clock.timed(f"{name}: judge", rows, lambda: judge(*arguments, exotic))
    found, _ = clock.timed(f"{name}: histories", rows, lambda: fold_histories(judged, *arguments, fold=judged.fold))
    for number, histories_now in found.items():
        state[names[number]] = histories_now
    counts = np.bincount(judged.verdicts, minlength=len(VERDICTS))
    return int(judged.fold.sum()), {VERDICTS[i].value: int(n) for i, n in enumerate(counts) if n}


def decoded(clock, name, decoder, batch, chunk):
    return clock.timed(
        name,
        batch.num_rows,
        lambda: [decoder.decode(batch.slice(start, chunk)) for start in range(0, batch.num_rows, chunk)],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--resent", type=float, default=0.05)
    parser.add_argument("--chunk", type=int, default=100_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = random.Random(7)
    topic = Topic("legs", Timestamp)
    decoder = Decoder(topic)
    clock, verdicts = Clock(), {}
    first: dict[str, Histories] = {}
    second: dict[str, Histories] = {}
    runs = [("new", 0.0, 0), (f"{options.resent:.0%} re-sent", options.resent, options.rows)]
    batches = {name: records(options.rows, options.keys, resent, rng, start) for name, resent, start in runs}
    decoder.decode(next(iter(batches.values())).slice(0, 100))
    for name, records_ in [*batches.items(), ("replay", batches[runs[1][0]])]:
        decoded(clock, f"{name}: decode", decoder, records_, options.chunk)
        batch = decoder.decode(records_)
        keys = batch.frame.get_column(schema.KEY).cast(pl.String)
        last = keys.str.slice(-1)
        for label, keyed, rekeyed, state in (
            (name, keys.to_numpy(), False, first),
            (f"{name}, rekeyed", last.to_numpy(), True, second),
        ):
            folded, verdicts[label] = stage(clock, label, batch, keyed, rekeyed, state)
            assert folded == (0 if name == "replay" else options.rows), (label, folded)
    if options.json:
        print(json.dumps({"us_per_row": clock.micros, "verdicts": verdicts}))
        return
    for name, micros in clock.micros.items():
        print(f"{name:34} {micros:7.3f} us a row")
    for name, counts in verdicts.items():
        print(f"{name:34} {counts}")


if __name__ == "__main__":
    main()

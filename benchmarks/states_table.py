"""Time and memory of reading a million states: scanned, selected, as JSON lines and as Parquet.

    python benchmarks/states_table.py lmdb:///tmp/states [--keys 1000000]

Fills the store if it has no states of the flow, then reads them in a process of its own for each way. Memory is the
peak of that process, and how much it is above the peak of reading a single page. Pages of LMDB's file that the process
has mapped count as memory; the system takes them back when it needs them, so anonymous memory is shown apart.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from aggregations.definition.aggregates import count, maximum, total
from aggregations.definition.fields import Fields
from aggregations.definition.flow import Flow
from aggregations.definition.source import Json, Topic
from envelope import Histories, History
from jobs.table.files import write_json, write_parquet
from jobs.views import states
from persistence.protocol import FlowRef, Write
from persistence.record import StateRecord, encode_record
from persistence.registry import open_store

WAYS = ("page", "last page", "views", "where", "batches", "json", "parquet")
FLOW = (
    Flow("million")
    .source(Topic("legs", Json({"tail": str, "minutes": int}), envelope=False))
    .aggregate("tail", "tail", Fields(legs=count(), minutes=total("minutes"), longest=maximum("minutes")))
)


def fill(url: str, keys: int) -> None:
    """Write states of four positions each."""
    store, ref = open_store(url), FlowRef("million").stage("tail")
    if next(iter(store.scan(ref)), None) is not None:
        return
    epoch, definition = store.acquire_epoch(ref.flow_ref), FLOW.stages[0].definition
    for batch, start in enumerate(range(0, keys, 50_000)):
        writes = []
        for at in range(start, min(start + 50_000, keys)):
            history = History(tuple((at + place * 7919, 0) for place in range(4)), None, batch)
            lanes = Histories({f"legs:{at % 4}#T1": history}, {})
            state = {"legs": 4, "minutes": at % 1000, "longest": at % 300}
            writes.append(Write(b"N%08d" % at, 0, encode_record(StateRecord(definition, state, lanes))))
        store.save(ref, writes, epoch=epoch, batch=batch)
    store.close()


def peaks() -> tuple[int, int]:
    """Peak of resident memory, and anonymous memory now, in megabytes."""
    text = Path("/proc/self/status").read_text()
    return tuple(int(re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)[1]) // 1024 for name in ("VmHWM", "RssAnon"))


def read(url: str, how: str) -> str:
    """Read all states in one way."""
    stores, folder = {"tail": url}, Path(tempfile.mkdtemp())
    found = states(FLOW, "tail", stores)
    begin, cpu = time.perf_counter(), time.process_time()
    if how == "page":
        done = len([*islice(found, 1)])
    elif how == "views":
        done = sum(1 for _ in found)
    elif how == "batches":
        done = sum(batch.num_rows for batch in found.batches())
    elif how == "where":
        done = sum(1 for _ in states(FLOW, "tail", stores, where="minutes = 999 AND legs > 3"))
    elif how == "last page":
        done = sum(1 for _ in states(FLOW, "tail", stores, after=b"N00999000", limit=500))
    elif how == "json":
        done = write_json(found, folder / "states.jsonl", lambda _: None)
    else:
        done = write_parquet(states(FLOW, "tail", stores, histories=True), folder / "states.parquet", lambda _: None)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak, anonymous = peaks()
    return f"{how:10s} {done:>9,} states {seconds:7.2f} s, CPU {cpu:6.2f} s, peak {peak:>5,} MB, anonymous {anonymous:>5,} MB"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--how", choices=WAYS)
    given = parser.parse_args()
    if given.how:
        print(read(given.url, given.how))
    else:
        fill(given.url, given.keys)
        for how in WAYS:
            subprocess.run([sys.executable, __file__, given.url, "--how", how], check=True)

"""Bytes of the states of filters, for each key, id or producer that they remember.

    python benchmarks/filter_sizes.py [--json]

A thousand records with times a millisecond apart go through each filter. The bytes are those of the state's JSON text as a
store keeps it, divided by what the state remembers, without the key, id or name itself (15 bytes). A `SequenceFilter` has
one number for each partition or key: the smallest and the largest state are shown.
"""

import argparse
import json
from datetime import timedelta

from envelope.filters import (
    Arrival,
    EventIdFilter,
    FilterStates,
    ProducerFilter,
    SequenceFilter,
    SequenceMaps,
    SessionWindows,
    Stamp,
    TimeWindows,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
)

COUNT = 1000
HOUR = timedelta(hours=1)
FIRST_MS = 1_700_000_000_000
FIRST_OFFSET = 10**9
FIRST_NUMBER = 10**6


def name(number):
    """A key, id or name of a producer."""
    return f"customer-{number:06}"


def value_of(arrival):
    return arrival.value


def text(value):
    return json.dumps(value, separators=(",", ":"))


def per_id(rule, value=name):
    """Bytes for each of a thousand keys or ids."""
    states = FilterStates(rule)
    for n in range(COUNT):
        states.judge(Arrival("t", 0, FIRST_OFFSET + n, name(n).encode(), value(n), FIRST_MS + n))
    [dumped] = states.dump().values()
    return len(text(dumped)) / COUNT - len(name(0))


def per_pair():
    """Bytes for each pair of a key and an id, without both."""
    return per_id(deduplicate_by_key_value(value_of, HOUR)) - len(name(0))


def spread(rule, place="t:0"):
    """Bytes for each id that is spread over states, without the id and the name of its partition."""
    states = FilterStates(rule)
    for n in range(COUNT):
        states.judge(Arrival("t", 0, FIRST_OFFSET + n, None, name(n), FIRST_MS + n))
    return sum(len(text(one)) for one in states.dump().values()) / COUNT - len(name(0)) - len(place)


def per_producer_of_a_log():
    """Bytes of a snapshot of sequence maps for each producer."""
    maps = SequenceMaps()
    for n in range(COUNT):
        maps.push(name(n), FIRST_NUMBER + n)
        maps.acknowledged(n)
    return len(text(maps.snapshot().dump())) / COUNT - len(name(0))


def of_a_number():
    """Bytes of the smallest and the largest state of a sequence filter."""
    states = FilterStates(SequenceFilter(value_of))
    for n, number in enumerate([1, -(1 << 63)]):
        states.judge(Arrival("t", n, 0, b"%d" % abs(number), number))  # the key contains the number, which is counted
    states.judge(Arrival("t", 2, 0, b"", 1))
    sizes = [len(text(one)) for one in states.dump().values()]
    return min(sizes), max(sizes)


SIZES = {
    "`deduplicate_by_key`": lambda: per_id(deduplicate_by_key(HOUR)),
    "`deduplicate_by_key_value`": per_pair,
    "`deduplicate_by_key`, changed key": lambda: spread(deduplicate_by_key(HOUR, key=value_of, partitions=4)),
    "`deduplicate`": lambda: spread(deduplicate(value_of, HOUR, partitions=4)),
    "`distinct`, tumbling": lambda: per_id(distinct(TimeWindows(HOUR))),
    "`distinct`, sessions": lambda: per_id(distinct(SessionWindows(HOUR))),
    "`ProducerFilter`": lambda: per_id(
        ProducerFilter(value_of), lambda n: Stamp(name(n), FIRST_NUMBER + n, contiguous=True)
    ),
    "`EventIdFilter`": lambda: per_id(EventIdFilter(value_of, HOUR)),
    "`EventIdFilter`, over partitions": lambda: spread(EventIdFilter(value_of, HOUR, partitions=4), ""),
    "`SequenceMaps`": per_producer_of_a_log,
}
"""How the bytes of each filter are measured; by its name on the page about filters."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = {name.replace("`", ""): round(measure()) for name, measure in SIZES.items()}
    low, high = of_a_number()
    if args.json:
        print(json.dumps({"bytes": found, "SequenceFilter": [low, high]}))
        return
    print(f"{'SequenceFilter':28} {low} to {high}")
    for filter_name, size in found.items():
        print(f"{filter_name:28} {size}")


if __name__ == "__main__":
    main()

"""Makes the conformance vectors of the filters and of the sequence maps, and reads them."""

import json
import random
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from envelope import Envelope, Hop, encode
from envelope.filters import (
    Arrival,
    Beyond,
    Decreasing,
    DedupPolicy,
    Entry,
    EventIdFilter,
    FilterStates,
    Gaps,
    ProducerFilter,
    Scope,
    SequenceFilter,
    SequenceMaps,
    SessionWindows,
    Snapshot,
    Stamp,
    TimeWindows,
    Unusable,
    deduplicate,
    deduplicate_by_key,
    deduplicate_by_key_value,
    distinct,
    from_header,
    from_value,
)
from tests.seeds.test_000_sequence_filter import INCIDENTS
from tests.seeds.test_001_deduplicate import EXAMPLES
from tests.seeds.test_001_distinct import RECORDS

Json = dict[str, Any]
DAY_MS = 86_400_000


def arrival(
    offset: int | None, key: str | None, seconds: float, *, partition: int = 0, header: str | None = None, **value: Any
) -> Json:
    """A record as the file has it."""
    found = {"topic": "t", "partition": partition, "offset": offset, "key": None if key is None else key.encode().hex()}
    found |= {"timestamp_ms": round(seconds * 1000), "value": json.dumps(value).encode().hex()}
    return found if header is None else {**found, "headers": [["id", header.encode().hex()]]}


def filters() -> Iterator[tuple[str, Json, list[Json]]]:
    yield from sequences()
    yield from intervals()
    yield from windows()
    yield from producers()
    yield from event_ids()


def sequences() -> Iterator[tuple[str, Json, list[Json]]]:
    sent = [arrival(n, incident, 0, id=number, data=data) for n, (incident, number, data) in enumerate(INCIDENTS)]
    yield "000: incidents A, B and C", {"type": "sequence"}, sent
    bad: list[Any] = [5, 5, 4, "6", "x", None, 7.0, 2**63, -(2**63), 7]
    odd = [arrival(n, "k", 0, id=one) for n, one in enumerate(bad)]
    yield "000: bad and missing numbers", {"type": "sequence"}, odd
    yield "000: bad and missing numbers, passed on", {"type": "sequence", "unusable": "forward"}, odd
    lower = [arrival(n, "k", 0, id=one) for n, one in enumerate([3, 4, 2, 4, 3, 5])]
    yield "000: lower numbers, rejected", {"type": "sequence", "decreasing": "reject"}, lower
    keys = [
        arrival(n, key, 0, id=one) for n, (key, one) in enumerate([("a", 5), ("b", 3), ("a", 4), ("b", 4), (None, 1)])
    ]
    yield "000: a number for each key", {"type": "sequence", "scope": "key"}, keys
    two = [arrival(n, "k", 0, partition=n % 2, id=one) for n, one in enumerate([2, 1, 1, 2, 3, 1])]
    yield "000: a number for each partition", {"type": "sequence"}, two
    inside = [arrival(n, f"order-{n}", 0, id=n) for n in range(9)]
    yield "000: the key is the sequence, a warning", {"type": "sequence"}, inside
    headers = [arrival(n, "k", 0, header=one) for n, one in enumerate(["7", "7", "+8", "8x"])]
    yield "000: the number is in a header", {"type": "sequence", "id": "header:id"}, [*headers, arrival(4, "k", 0)]


def intervals() -> Iterator[tuple[str, Json, list[Json]]]:
    for title, (seconds, events) in EXAMPLES.items():
        records = [arrival(n, key, time, id=key) for n, (key, time, _) in enumerate(events)]
        for kind in ("by_key", "by_key_value", "by_id"):
            yield f"001: {title}, {kind}", {"type": kind, "interval_ms": seconds * 1000}, records
    odd = [(0, None, 1), (1, "k", 1), (1, "k", 1), (None, "k", 1), (2, "k", 1), (3, None, 30), (4, "k", 5)]
    ten = {"interval_ms": 10_000}
    yield "001: null keys and offsets, a reprocess", {"type": "by_key", **ten}, [arrival(*one) for one in odd]
    draw = random.Random(1)
    spread = [
        arrival(
            n, "k", n + draw.choice([0, 0, -4, -15]), partition=n % 2, id=draw.choice("xyz"), owner=draw.choice("abc")
        )
        for n in range(30)
    ]
    spread += [arrival(30, "k", 40, id="x"), arrival(31, "k", 40, owner="a"), arrival(32, "k", 40, owner=7)]
    for kind in ("by_key", "by_key_value"):
        yield f"001: a changed key, {kind}", {"type": kind, **ten, "key": "value:owner", "partitions": 4}, spread
    yield "001: ids over four states, by_id", {"type": "by_id", **ten, "partitions": 4}, spread
    times = [arrival(n, "k", 0, at=time) for n, time in enumerate([5000, 15_000, 16_000, None, "x", 4000])]
    yield "001: the time is in the value", {"type": "by_key", **ten, "time": "value:at"}, times


def windows() -> Iterator[tuple[str, Json, list[Json]]]:
    bursts = [arrival(n, "key", time) for n, time in enumerate(RECORDS)]
    yield "001: distinct, tumbling", {"type": "tumbling", "size_ms": 10_000, "grace_ms": DAY_MS}, bursts
    for gap in (10_000, 9_000):
        yield f"001: distinct, session, gap {gap}", {"type": "session", "gap_ms": gap, "grace_ms": DAY_MS}, bursts
    times = [(0, "a"), (1, "a"), (30, "b"), (2, "a"), (9, "b"), (31, None), (14, "a"), (41, "a"), (26, "b")]
    records = [arrival(n, key, 0, at=seconds * 1000) for n, (seconds, key) in enumerate(times)]
    for scope in Scope:
        more = {"grace_ms": 5000, "scope": scope.value, "time": "value:at"}
        yield (
            f"001: distinct, tumbling, stream time of the {scope}",
            {"type": "tumbling", "size_ms": 8000, **more},
            records,
        )
        yield (
            f"001: distinct, session, stream time of the {scope}",
            {"type": "session", "gap_ms": 5000, **more},
            records,
        )


def producers() -> Iterator[tuple[str, Json, list[Json]]]:
    draw = random.Random(7)
    numbers = [draw.randrange(8) for _ in range(30)]
    drawn = [
        arrival(n, "k", n, producer=draw.choice("pq"), sequence=one, contiguous=True) for n, one in enumerate(numbers)
    ]
    for gaps in Gaps:
        yield f"002: contiguous numbers, {gaps}", {"type": "producer", "gaps": gaps.value}, drawn
    sessions = [(0, 1, None), (1, 2, None), (2, 1, None), (2, 2, 4), (3, 2, 5), (1, 2, 2), (6, 3, None), (7, 2, None)]
    yield (
        "004: holes, epochs and batches",
        {"type": "producer"},
        [
            arrival(n, "k", n, producer="p", sequence=first, epoch=epoch, last=last)
            for n, (first, epoch, last) in enumerate(sessions)
        ],
    )
    two = [arrival(n // 2, "k", n, partition=n % 2, **stamped("p", one)) for n, one in enumerate([2, 1, 1, 2, 4, 3])]
    yield "004: a number for each partition", {"type": "producer"}, two
    sent = {"producer": "p", "producer_epoch": 1, "sequence_per_partition": True}
    envelopes = [Envelope(b"x", sequence=n, last_sequence=n + 1, **sent) for n in (0, 2, 0)]
    envelopes += [Envelope(b"x", (Hop("raw", 0, 1, via="wrap", index=0),), sequence=0, **sent), Envelope(b"x")]
    read = [{**arrival(n, "k", n), "value": encode(one).hex()} for n, one in enumerate(envelopes)]
    yield "004: the stamp is in the envelope", {"type": "producer", "stamp": "envelope"}, [*read, arrival(9, "k", 9)]
    turns = [("p", 0), ("q", 0), ("p", 0), ("r", 0), ("q", 0), ("p", 0), ("p", 1), (None, 0), ("r", 1)]
    few = [arrival(n, "k", n, **stamped(name, one)) for n, (name, one) in enumerate(turns)]
    yield "004: at most two producers", {"type": "producer", "limit": 2}, few
    idle = [
        ("p", 0, 0),
        ("q", 0, 8),
        ("p", 0, 10),
        ("q", 0, 18),
        ("p", 0, 21),
        (None, 0, 40),
        ("q", 0, 30),
        ("p", 0, 41),
    ]
    late = [arrival(n, "k", 0, at=time * 1000, **stamped(name, one)) for n, (name, one, time) in enumerate(idle)]
    yield "004: producers are forgotten", {"type": "producer", "expiry_ms": 10_000, "time": "value:at"}, late
    early = [0, 2, 4, 3, 6, 1, 8, 10, 12, 7, 9]
    held = [arrival(n, "k", n, producer="p", sequence=one, contiguous=True) for n, one in enumerate(early)]
    yield "002: at most two messages are held back", {"type": "producer", "gaps": "hold", "hold": 2}, held
    batches = [(0, 3, True), (6, 8, True), (5, 6, True), (6, 8, True), (4, 5, True), (12, 13, True), (11, 11, False)]
    mixed = [
        arrival(n, "k", n, producer="p", sequence=first, last=end, contiguous=contiguous)
        for n, (first, end, contiguous) in enumerate(batches)
    ]
    yield "002: batches are held back, and a numbering changes", {"type": "producer", "gaps": "hold"}, mixed
    skipped = [arrival(n, "k", n, producer="p", sequence=2 * n, contiguous=True) for n in range(36)]
    again = [
        arrival(36 + n, "k", 40, producer="p", sequence=one, contiguous=True) for n, one in enumerate([1, 3, 7, 9, 7])
    ]
    yield "002: at most 32 ranges are missing", {"type": "producer"}, [*skipped, *again]
    wrong: list[Any] = [
        *({"producer": "", "sequence": 1}, {"producer": "p", "sequence": "1"}, {"producer": "p", "sequence": 2**63}),
        *(
            {"producer": "p", "sequence": 4, "last": 3},
            {"producer": "p", "sequence": 4},
            {"producer": "p", "sequence": 2, "last": 6},
        ),
    ]
    yield "002: bad stamps", {"type": "producer"}, [arrival(n, "k", n, **one) for n, one in enumerate(wrong)]


def stamped(producer: str | None, sequence: int) -> Json:
    return {} if producer is None else {"producer": producer, "sequence": sequence}


def event_ids() -> Iterator[tuple[str, Json, list[Json]]]:
    draw = random.Random(5)
    drawn = [arrival(n, "k", max(0, n - draw.choice([0, 0, 8, 15])), id=f"e{draw.randrange(20)}") for n in range(40)]
    for limit in (3, 1000):
        yield f"event ids, limit {limit}", {"type": "event_id", "horizon_ms": 10_000, "limit": limit}, drawn
    for beyond in (Beyond.DROP, Beyond.REJECT):
        settings = {"type": "event_id", "horizon_ms": 10_000, "limit": 3, "beyond": beyond.value}
        yield f"event ids, beyond the horizon: {beyond}", settings, drawn
    many = [
        arrival(n, draw.choice("ab"), 0, partition=n % 3, id=draw.choice([1, "1", "é", 'x"y', "z"]), at=1000 * n)
        for n in range(30)
    ]
    many.append(arrival(30, "a", 0, at=0))
    more = {"horizon_ms": 10_000, "time": "value:at"}
    yield "event ids over four states", {"type": "event_id", "partitions": 4, **more}, many
    headers = [arrival(n, "k", n, header=one) for n, one in enumerate(["a", "b", "a"])]
    yield "event ids in a header", {"type": "event_id", "horizon_ms": 5000, "id": "header:id"}, headers
    yield "event ids of a key", {"type": "event_id", "scope": "key", **more}, many


def filter_vector(name: str, settings: Json, records: list[Json]) -> Json:
    return {"name": name, "filter": settings, "records": records, **read_filter(settings, records)}


def extractor(text: str) -> Any:
    kind, _, name = text.partition(":")
    return from_header(name) if kind == "header" else from_value(name)


def stamp(one: Arrival) -> Stamp | None:
    """The stamp in the JSON object of a value; None without a producer."""
    fields = {name: value for name, value in json.loads(one.value).items() if name in Stamp.__dataclass_fields__}
    return Stamp(**fields) if "producer" in fields else None


def rule_of(settings: Mapping[str, Any]) -> Any:
    """The filter of a vector. Its numbers, ids and stamps are members of the JSON object in the value."""

    def duration(name: str) -> timedelta:
        return timedelta(milliseconds=settings[f"{name}_ms"])

    identity, kind = extractor(settings.get("id", "value:id")), settings["type"]
    scope = Scope(settings.get("scope", "partition"))
    time = {"time": extractor(settings["time"])} if "time" in settings else {}
    keyed = {name: settings[name] for name in ("partitions",) if name in settings} | time
    if "key" in settings:
        keyed["key"] = extractor(settings["key"])
    match kind:
        case "sequence":
            unusable = Unusable(settings.get("unusable", "reject"))
            return SequenceFilter(identity, scope, unusable, Decreasing(settings.get("decreasing", "drop")))
        case "by_key":
            return deduplicate_by_key(duration("interval"), **keyed)
        case "by_key_value":
            return deduplicate_by_key_value(identity, duration("interval"), **keyed)
        case "by_id":
            return deduplicate(identity, duration("interval"), **{"partitions": 1, **keyed})
        case "tumbling":
            return distinct(TimeWindows(duration("size"), duration("grace")), scope_by=scope, **time)
        case "session":
            return distinct(SessionWindows(duration("gap"), duration("grace")), scope_by=scope, **time)
        case "producer":
            bounds: Json = {name: settings[name] for name in ("limit", "hold") if name in settings}
            if "expiry_ms" in settings:
                bounds["expiry"] = duration("expiry")
            if settings.get("stamp") != "envelope":
                bounds["stamp"] = stamp
            return ProducerFilter(gaps=Gaps(settings.get("gaps", "report")), **bounds, **time)
    rest = {name: settings[name] for name in ("limit", "partitions") if name in settings}
    beyond = Beyond(settings.get("beyond", "forward"))
    return EventIdFilter(identity, duration("horizon"), beyond=beyond, scope_by=scope, **rest, **time)


def read_filter(settings: Mapping[str, Any], records: list[Json]) -> Json:
    """The ruling about each record, and the states after the last one."""
    states, rulings = FilterStates(rule_of(settings)), []
    for one in records:
        key = None if one["key"] is None else bytes.fromhex(one["key"])
        value = bytes.fromhex(one["value"])
        headers = tuple((name, bytes.fromhex(found)) for name, found in one.get("headers", ()))
        ruling = states.judge(
            Arrival(one["topic"], one["partition"], one["offset"], key, value, one["timestamp_ms"], headers)
        )
        found: Json = {"verdict": ruling.verdict.value, "forward": ruling.forward}
        if ruling.reason:
            found["reason"] = ruling.reason.value
        if ruling.window:
            found["window_ms"] = [ruling.window.start_ms, ruling.window.end_ms]
        if ruling.missing:
            found["missing"] = list(ruling.missing)
        if ruling.released:
            found["released"] = list(ruling.released)
        if ruling.warning:
            found["warning"] = True
        rulings.append(found)
    return {"rulings": rulings, "states": {scope.decode(): value for scope, value in states.dump().items()}}


def sequence_maps() -> Iterator[tuple[str, Json]]:
    sent: list[list[Any]] = [
        ["push", "p", 1],
        ["push", "p", 2],
        ["push", "p", 2],
        ["acknowledged", 0],
        ["push", "p", 1],
    ]
    yield "004: sent is not stored", {"calls": sent}
    lost: list[list[Any]] = [["failed"], ["push", "p", 2], ["push", None, 0], ["acknowledged", 1], ["acknowledged", 5]]
    yield "004: what failed is accepted again", {"calls": [*sent, *lost]}
    due = [call for n in range(7) for call in (["push", "pq"[n % 2], n], ["acknowledged", n])]
    yield "004: a snapshot every 3 entries", {"every": 3, "calls": due}
    tail = [[3, "p", 9], [4, None, 0], [6, "q", 2], [7, "p", 8]]
    calls = [["push", name, number] for name, number in (("p", 9), ("p", 10), ("q", 3), ("r", 0))]
    snapshot = {"next_offset": 3, "sequences": {"r": 5, "p": 4}}
    yield "004: recovery from a snapshot and the tail", {"snapshot": snapshot, "tail": tail, "calls": calls}
    calls = [call for n, name in enumerate("pqrp") for call in (["push", name, 0], ["acknowledged", n])]
    yield "004: at most two producers", {"limit": 2, "calls": [*calls, ["snapshot"]]}


def map_vector(name: str, given: Json) -> Json:
    return {"name": name, **given, **read_maps(given)}


def read_maps(given: Mapping[str, Any]) -> Json:
    """What each call returns, and the maps after the last one."""
    snapshot = Snapshot.load(given["snapshot"]) if "snapshot" in given else None
    tail = [Entry(*one) for one in given.get("tail", ())]
    maps = SequenceMaps(snapshot, tail, **{name: given[name] for name in ("every", "limit") if name in given})
    returned: list[Any] = []
    for name, *arguments in given["calls"]:
        found = getattr(maps, name)(*arguments)
        if isinstance(found, Snapshot):
            found = found.dump()
        returned.append([list(one) for one in found] if isinstance(found, list) else found)
    return {"returned": returned, "pushed": maps.pushed, "persisted": maps.persisted, "covered": maps.covered}


POLICY: Json = {
    "default": False,
    "namespaces": {"payments.": True, "payments.test.": False, "pay": False},
    "topics": {"payments.test.one": True, "payments.audit": False},
}
TOPICS = [
    *("payments.in", "payments.test.two", "payments.test.one", "payments.audit", "payments", "payroll", "other"),
    "payments.audit.more",
]


def policies() -> Iterator[Json]:
    for default in (False, True):
        policy = {**POLICY, "default": default}
        yield {"name": f"004: by default {str(default).lower()}", **policy, "enabled": read_policy(policy, TOPICS)}


def read_policy(policy: Mapping[str, Any], topics: list[str]) -> dict[str, bool]:
    found = DedupPolicy(policy["default"], policy["namespaces"], policy["topics"])
    return {topic: found.enabled(topic) for topic in topics}

"""Makes the conformance vectors: bytes in, verdicts out. `python -m tests.golden.conformance` writes them.

`docs/reference/conformance.md` describes the file. `read_*` need nothing but the file, as any other implementation.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from envelope import Envelope, EnvelopeError, Histories, Hop, Lineage, Node, append_hop, decode, encode
from envelope.envelope_pb2 import Envelope as WireEnvelope
from envelope.envelope_pb2 import Hop as WireHop
from tests.golden.filter_vectors import filter_vector, filters, map_vector, policies, sequence_maps
from tests.golden.test_bytes import ENVELOPE, WRITTEN

FILE = Path(__file__).parents[2] / "proto" / "headwater" / "envelope" / "v1" / "conformance.json"

Json = dict[str, Any]


def made() -> Json:
    """The whole file."""
    return {
        "version": 1,
        "envelopes": [envelope_vector(*one) for one in envelopes()],
        "appended_hops": [hop_vector(*one) for one in hops()],
        "lineages": [lineage_vector(*one) for one in lineages()],
        "filters": [filter_vector(*one) for one in filters()],
        "sequence_maps": [map_vector(*one) for one in sequence_maps()],
        "policies": list(policies()),
    }


def plain(one: Any) -> Json:
    """The fields of an envelope or hop that differ from their defaults; bytes in hexadecimal."""
    found: Json = {}
    for field in fields(one):
        value = getattr(one, field.name)
        if field.name == "format" or (value == field.default and type(value) is type(field.default)):
            continue
        if field.name == "chain":
            value = [plain(hop) for hop in value]
        found[field.name] = value.hex() if isinstance(value, bytes) else value
    return found


def envelopes() -> Iterator[tuple[str, bytes]]:
    small = encode(Envelope(b"30", (Hop("till", 0, 17, via="ledger", index=0),), key=b"ada"))
    yield "every field", WRITTEN
    yield "the smallest", encode(Envelope(b""))
    yield "one hop", small
    yield "negative time, long numbers", encode(Envelope(b"x", event_time_us=-1, producer="p", sequence=(1 << 63) - 1))
    yield "with the framing of a schema registry", b"\0\0\0\0\7\0" + small
    yield "an unknown field is kept", encode(Envelope(b"x", unknown=bytes.fromhex("a20602686a")))
    yield "empty", b""
    yield "foreign bytes", b'{"id": 1}'
    yield "a newer format", b"\x08\x02" + small[2:]
    yield "no format", small[2:]
    for cut in (1, 6, len(small) // 2):
        yield f"without its last bytes: {cut}", small[:-cut]
    yield "a changed byte", small.replace(b"ledger", b"ledges")
    yield "two messages joined", small + small
    yield "a hop without a topic", unsealed({"partition": 0, "offset": 1})
    yield "a hop without an offset", unsealed({"topic": "a", "partition": 0})
    yield "a hop with a bad topic", unsealed({"topic": "a b", "partition": 0, "offset": 1})
    yield "a hop with a negative offset", unsealed({"topic": "a", "partition": 0, "offset": -1})
    for count in (32, 33):
        yield f"{count} hops", unsealed(*({"topic": f"t{n}", "partition": 0, "offset": n} for n in range(count)))


def unsealed(*hops: Json) -> bytes:
    """An envelope without a checksum, as another library may write it, with these hops."""
    return WireEnvelope(format=1, payload=b"x", chain=[WireHop(**hop) for hop in hops]).SerializeToString()


def envelope_vector(name: str, value: bytes) -> Json:
    return {"name": name, "bytes": value.hex(), **read_envelope(value.hex())}


def read_envelope(text: str) -> Json:
    try:
        return {"envelope": plain(decode(bytes.fromhex(text)))}
    except EnvelopeError as error:
        return {"reason": error.reason.value}


def hops() -> Iterator[tuple[str, bytes, Hop]]:
    small = encode(Envelope(b"x"))
    yield "to an envelope without hops", small, Hop("a", 0, 0)
    yield (
        "with every field",
        encode(ENVELOPE),
        Hop("c", 1, 9, "s", 0, 2, True, False, "Qx1", 3, 1356998400000, "west", True),
    )
    yield "long numbers", small, Hop("a", 2**31 - 1, 2**62, index=300)


def hop_vector(name: str, value: bytes, hop: Hop) -> Json:
    return {
        "name": name,
        "bytes": value.hex(),
        "hop": plain(hop),
        "result": read_hop(value.hex(), plain(hop)),
    }


def read_hop(text: str, hop: Mapping[str, Any]) -> str:
    return append_hop(bytes.fromhex(text), Hop(**hop)).hex()


def record(topic: str, partition: int, offset: int, *chain: Hop, event_id: str = "", rekeyed: bool = False) -> Json:
    value = encode(Envelope(b"x", chain, event_id=event_id)).hex()
    return {"topic": topic, "partition": partition, "offset": offset, "value": value, "rekeyed": rekeyed}


def lineages() -> Iterator[tuple[str, list[Json]]]:
    def wrapped(root: int, offset: int, index: int | None = 0, *, partition: int = 0, **more: Any) -> Json:
        hop = Hop("raw", 0, root, via="wrap", index=index, rekeyed=more.pop("changed", False))
        return record("legs", partition, offset, hop, **more)

    yield "the root is the record's own", [record("raw", 0, offset) for offset in (3, 4, 4, 3)]
    yield (
        "a republisher sends again",
        [wrapped(17, 4), wrapped(17, 5, 1), wrapped(18, 6), wrapped(17, 9), wrapped(17, 10, 1)],
    )
    roots = [(1, 3), (2, 3), (1, 4), (2, 3), (1, 4), (9, 0), (9, None)]
    yield (
        "an offset is used again in another leader epoch",
        [
            record("legs", 0, n, Hop("raw", 0, root, via="wrap", index=0, leader_epoch=epoch))
            for n, (root, epoch) in enumerate(roots)
        ],
    )
    yield "late within the history", [wrapped(20, 0), wrapped(19, 1), wrapped(19, 2)]
    yield (
        "below the floor of 32 positions",
        [*(wrapped(root, root) for root in range(40)), wrapped(7, 50), wrapped(8, 51)],
    )
    yield "the key is kept: another partition is the same lane", [wrapped(1, 0), wrapped(1, 0, partition=1)]
    yield (
        "the key is changed: each partition is a lane",
        [
            wrapped(5, 0, changed=True),
            wrapped(3, 0, changed=True, partition=1),
            wrapped(5, 1, changed=True, partition=1),
        ],
    )
    yield "the stage changes the key", [record("raw", partition, 5, rekeyed=True) for partition in (0, 1, 0)]
    two = [Hop("raw", 0, 1, via=via, index=0) for via in ("wrap", "copy")]
    yield "two republishers between the same topics", [record("legs", 0, n, hop) for n, hop in enumerate(two)]
    yield (
        "no index, told apart by event ids",
        [wrapped(1, n, None, event_id=one) for n, one in enumerate(["a", "b", "a"])],
    )
    retry = Hop("legs", 0, 4, via="retry", pass_through=True)
    first = [Hop("raw", 0, root, via="wrap", index=0) for root in (1, 40)]
    yield (
        "a retry topic is not part of the lineage",
        [
            record("legs", 0, 4, first[0]),
            record("legs.retry", 0, 0, first[0], retry),
        ],
    )
    yield (
        "a retry below the floor is unproven",
        [
            *(wrapped(root, root) for root in range(100, 140)),
            record("legs.retry", 0, 0, first[0], retry),
        ],
    )
    yield "a loop", [record("raw", 0, 9, Hop("raw", 0, 1), Hop("legs", 0, 2))]


def lineage_vector(name: str, records: list[Json]) -> Json:
    return {"name": name, "records": records, "expected": read_lineage(records)}


def read_lineage(records: list[Json]) -> list[Json]:
    """Judge records of one key one after the other, each a batch."""
    histories, found = Histories(), []
    for number, one in enumerate(records):
        message = decode(bytes.fromhex(one["value"]))
        lineage = Lineage.of(message.chain, Node(one["topic"], one["partition"], one["offset"]))
        try:
            standing = lineage.check().standing(rekeyed=one["rekeyed"], event_id=message.event_id)
        except EnvelopeError as error:
            found.append({"verdict": "rejected", "reason": error.reason.value})
            continue
        [decision] = histories.judge([standing])
        if decision.fold:
            histories, _ = histories.folding([standing], batch=number)
        result = {"lane": standing.lane, "group": standing.group, "position": list(standing.position)}
        found.append({**result, "verdict": decision.verdict.value, "fold": decision.fold})
    return found


def text(value: Json) -> str:
    """The file's text: a line for each record and ruling."""

    def lines(one: Any, indent: str) -> str:
        if isinstance(one, dict) and len(json.dumps(one)) > 100:
            inside = (f"{indent} {json.dumps(name)}: {lines(item, indent + ' ')}" for name, item in one.items())
            return "{\n" + ",\n".join(inside) + f"\n{indent}}}"
        if isinstance(one, list) and len(json.dumps(one)) > 100:
            return "[\n" + ",\n".join(f"{indent} {lines(item, indent + ' ')}" for item in one) + f"\n{indent}]"
        return json.dumps(one)

    return lines(value, "") + "\n"


if __name__ == "__main__":
    FILE.write_text(text(made()))

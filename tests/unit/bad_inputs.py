"""What can arrive that should not: one table for codec, republisher and aggregator.

Every value arrives as the record `legs:2:17` with key `N1`, unless its entry says otherwise.
"""

import gzip
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import google_crc32c

from envelope import Envelope, EnvelopeError, Hop, Reason, append_hop, encode
from envelope import envelope_pb2 as pb
from envelope.codec import HEAD, SEAL_TAG, varint
from envelope.limits import DEFAULT_LIMITS

TOPIC, PARTITION, OFFSET, KEY = "legs", 2, 17, b"N1"

HOP = Hop("raw", 1, 3, via="r", index=0, count=1)
GOOD = Envelope(b"payload", (HOP,), key=KEY, event_id="e1", event_time_us=5, payload_type="t")
VALUE = encode(GOOD)
BARE = Envelope(b"payload", key=KEY)


@dataclass(frozen=True, slots=True)
class BadInput:
    """Values of one kind and what becomes of each.

    Attributes:
        name: What is wrong.
        values: Values of records.
        codec: Reasons that `decode` may give; None where it accepts the value.
        hop: Reasons that a republisher may give; None where it passes the record on. As `codec` where not given.
        key: Key of the record.
        headers: Its headers.
        timestamp_ms: Its timestamp.
    """

    name: str
    values: tuple[bytes | None, ...]
    codec: frozenset[Reason] | None
    processor: frozenset[Reason] | None = field(default=frozenset())
    key: bytes | None = KEY
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = 1_700_000_000_000

    def __post_init__(self) -> None:
        if self.processor == frozenset():
            object.__setattr__(self, "processor", self.codec)


def one(name: str, value: bytes | None, *reasons: Reason, **more) -> BadInput:
    return BadInput(name, (value,), frozenset(reasons) or None, **more)


def accepted_by_codec(name: str, value: bytes, *reasons: Reason, **more) -> BadInput:
    return BadInput(name, (value,), None, frozenset(reasons), **more)


def reason(action: Callable[[], object]) -> Reason | None:
    """Why `action` refuses what it is given, which it has to say in words as well; None when it does not."""
    try:
        action()
    except EnvelopeError as error:
        assert error.detail
        return error.reason
    return None


def unsealed(tail: bytes) -> bytes:
    """An envelope of another producer: a format version and arbitrary bytes after it."""
    return b"\x08\x01" + tail


def sealed(body: bytes) -> bytes:
    """Any bytes, followed by their correct checksum."""
    crc: int = google_crc32c.value(body)
    return body + SEAL_TAG + crc.to_bytes(4, "little")


def hops(*bodies: bytes) -> bytes:
    return b"".join(b"\x4a" + varint(len(body)) + body for body in bodies)


def hop_body(**fields) -> bytes:
    return pb.Hop(**{"topic": "raw", "partition": 1, "offset": 3, **fields}).SerializeToString()


def group(depth: int) -> bytes:
    """Field 1000 as groups, one in the other."""
    return b"\xc3\x3e" * depth + b"\xc4\x3e" * depth


def random_values(count: int) -> tuple[bytes, ...]:
    rng = random.Random(20_261_121)
    return tuple(rng.randbytes(rng.randint(4, 128)) for _ in range(count))


ANY = frozenset(
    {
        Reason.EMPTY,
        Reason.NOT_AN_ENVELOPE,
        Reason.UNSUPPORTED_FORMAT,
        Reason.MALFORMED,
        Reason.TRUNCATED,
        Reason.CHECKSUM_MISMATCH,
        Reason.PAYLOAD_TOO_LARGE,
    }
)
FLIPS = tuple(
    VALUE[:at] + bytes([VALUE[at] ^ 1 << bit]) + VALUE[at + 1 :] for at in range(len(VALUE)) for bit in range(8)
)
PREFIXES = tuple(VALUE[:length] for length in range(len(VALUE)))
LOOP = encode(GOOD.with_chain((HOP, Hop("mid", 0, 1, via="s", index=0), Hop("raw", 0, 9, via="r", index=0))))
OWN_LOOP = encode(GOOD.with_chain((HOP, Hop("legs", 0, 1, via="s", index=0))))
LONG = encode(GOOD.with_chain(Hop(f"t{i}", 0, i, via="r", index=0) for i in range(DEFAULT_LIMITS.hops)))
TOO_LONG = append_hop(LONG, Hop("last", 0, 1))

BAD_INPUTS = [
    one("empty value", b"", Reason.EMPTY),
    one("null value", None, Reason.EMPTY),
    one("null key", encode(Envelope(b"payload")), key=None),
    accepted_by_codec("key differs from the envelope's key", VALUE, Reason.KEY_MISMATCH, key=b"N2"),
    accepted_by_codec("null key, but the envelope has one", VALUE, Reason.KEY_MISMATCH, key=None),
    one("key not UTF-8", encode(Envelope(b"payload", key=b"\xff\xfe")), key=b"\xff\xfe"),
    BadInput("every strict prefix", PREFIXES, ANY),
    BadInput("every single-bit flip", FLIPS, ANY),
    one("two envelopes concatenated", VALUE + VALUE, Reason.CHECKSUM_MISMATCH),
    one("a repeated singular field", unsealed(b"\x3a\x01a\x3a\x01b")),
    one("trailing byte", VALUE + b"\0", Reason.TRUNCATED),
    BadInput("random bytes", random_values(500), ANY),
    one("JSON", b'{"tail": "N1"}', Reason.NOT_AN_ENVELOPE),
    one("HTTP", b"GET / HTTP/1.1\r\n\r\n", Reason.NOT_AN_ENVELOPE),
    one("gzip, a compressed bomb", gzip.compress(bytes(10_000_000)), Reason.NOT_AN_ENVELOPE),
    one("Confluent-framed Avro", b"\0\0\0\0\x07\x06abc", Reason.NOT_AN_ENVELOPE, Reason.EMPTY),
    one("Confluent-framed envelope", b"\0\0\0\0\x07\0" + VALUE),
    one("wrong wire type of the payload", unsealed(b"\x38\x05"), Reason.MALFORMED),
    one("wrong wire type in a hop", unsealed(hops(hop_body() + b"\x20\x05")), Reason.MALFORMED),
    one("bad UTF-8 in a topic", unsealed(hops(b"\x0a\x02\xff\xfe\x10\x01\x18\x03")), Reason.MALFORMED),
    one("11-byte varint", unsealed(b"\x20" + b"\xff" * 10 + b"\x01"), Reason.MALFORMED),
    one("length of 2^64-1", unsealed(b"\x3a\x01a\x3a" + b"\xff" * 9 + b"\x01!a"), Reason.MALFORMED),
    one("length of 2 GiB with 3 bytes behind it", unsealed(b"\x3a" + varint(1 << 31) + b"abc"), Reason.MALFORMED),
    one("unknown groups nested 99 deep", unsealed(b"\x3a\x01a" + group(99))),
    one("nesting of 101", unsealed(b"\x3a\x01a" + group(101)), Reason.MALFORMED),
    one("a million empty hops", unsealed(hops(b"") * 1_000_000), Reason.PAYLOAD_TOO_LARGE),
    one("500,000 empty hops", unsealed(hops(b"") * 500_000), Reason.TOO_MANY_HOPS),
    one("a hop without fields", unsealed(hops(b"")), Reason.MISSING_FIELD),
    one("a hop without partition", unsealed(hops(b"\x0a\x03raw\x18\x03")), Reason.MISSING_FIELD),
    one("a hop without offset", unsealed(hops(b"\x0a\x03raw\x10\x01")), Reason.MISSING_FIELD),
    one("negative partition", unsealed(hops(hop_body(partition=-1))), Reason.BAD_COORDINATES),
    one("negative offset", unsealed(hops(hop_body(offset=-1))), Reason.BAD_COORDINATES),
    one("negative offset, sealed", append_hop(VALUE, hops(hop_body(topic="x", offset=-1))), Reason.BAD_COORDINATES),
    one("root offset 2^63-1", unsealed(hops(hop_body(offset=2**63 - 1))), Reason.BAD_COORDINATES),
    accepted_by_codec("root topic outside the allow-list", encode(GOOD.with_chain([Hop("evil", 0, 1)])), Reason.FOREIGN_ROOT),
    *(
        one(f"topic {what}", unsealed(hops(hop_body(topic=topic))), Reason.BAD_TOPIC)
        for what, topic in {
            "../x": "../x",
            "300 characters": "x" * 300,
            "braces": "{x}",
            "newline": "x\n",
            "ANSI codes": "\x1b[31mx",
            "..": "..",
        }.items()
    ),
    one("topic ../x, sealed", append_hop(VALUE, hops(hop_body(topic="../x"))), Reason.BAD_TOPIC),
    accepted_by_codec("loop in the chain", LOOP, Reason.CHAIN_LOOP),
    accepted_by_codec("loop through this topic", OWN_LOOP, Reason.CHAIN_LOOP),
    accepted_by_codec("no room for a hop more", LONG, Reason.TOO_MANY_HOPS),
    one("more hops than allowed", TOO_LONG, Reason.TOO_MANY_HOPS),
    accepted_by_codec(
        "another destination", encode(Envelope(b"payload", key=KEY, destination="other")), Reason.WRONG_DESTINATION
    ),
    one("the right destination", encode(Envelope(b"payload", key=KEY, destination=TOPIC))),
    one("newer format version", b"\x08\x02" + VALUE[2:], Reason.UNSUPPORTED_FORMAT),
    one("unknown fields", encode(Envelope(b"payload", key=KEY, unknown=b"\xc0\x3e\x07"))),
    one("payload over the limit", HEAD + b"\x3a" + varint((1 << 20) + 1) + bytes((1 << 20) + 1), Reason.TRUNCATED),
    one("payload over the limit, unsealed", unsealed(b"\x3a" + varint((1 << 20) + 1) + bytes((1 << 20) + 1)), Reason.PAYLOAD_TOO_LARGE),
    one("sealed without a checksum", HEAD + b"\x3a\x07payload", Reason.TRUNCATED),
    one("a checksum in front", b"\x08\x01" + SEAL_TAG + b"\0\0\0\0" + b"\x3a\x07payload", Reason.TRUNCATED),
    one("format version twice", sealed(HEAD + b"\x08\x61"), Reason.UNSUPPORTED_FORMAT),
    one("a checksum within another field", sealed(HEAD + b"\x3a\x07p"), Reason.TRUNCATED),
    one("a payload that ends as a checksum begins", unsealed(b"\x3a\x08ab" + SEAL_TAG + b"cdef")),
    *(one(f"timestamp {ms}", VALUE, timestamp_ms=ms) for ms in (0, -1, 253_402_300_799_000)),
    one("10,000 headers", VALUE, headers=tuple((f"h{i}", b"v") for i in range(10_000))),
    one("duplicate header names", VALUE, headers=(("h", b"1"), ("h", b"2"), ("h", None))),
]  # fmt: skip

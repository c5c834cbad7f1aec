"""Draws odd records: keys, values, headers and timestamps in every format, and damaged."""

import json
import math
import random
import struct
from collections.abc import Iterable
from typing import Any, Final

import polars as pl

from aggregations.definition.element import Record
from envelope import Envelope, Hop, encode
from jobs.republish.record import RETRY_ATTEMPT
from jobs.republish.retry import RETRY_DUE
from tests.fuzz.codec import corpus, mutate
from tests.messages import Every, Leg
from tests.support.both import TOPIC_ID

TOPIC: Final = "legs"
DAY_MS: Final = 86_400_000
NOW_MS: Final = 1_700_000_000_000
TIMES: Final = [
    *(
        0,
        -1,
        1,
        -(10**12),
        NOW_MS,
        NOW_MS + 1,
        NOW_MS + DAY_MS,
        NOW_MS - DAY_MS,
        253_402_300_799_999,
        253_402_300_800_000,
    ),
    *(NOW_MS * 1000, NOW_MS * 1_000_000, 2**63 - 1, -(2**63), -62_135_596_800_000, -62_135_596_800_001),
]
NUMBERS: Final = [
    *(
        "0",
        "-0",
        "1",
        "-1",
        "1.0",
        "1e2",
        "1e400",
        "-1e400",
        "1e-400",
        "0.1",
        "1E+2",
        "01",
        "1.",
        ".5",
        "+1",
        "NaN",
        "Infinity",
    ),
    *(str(sign * (2**bits + more)) for sign in (1, -1) for bits in (31, 32, 53, 63, 64, 127) for more in (-1, 0, 1)),
    *("9" * 400, "1" + "0" * 5000, "0." + "9" * 400, "1e" + "9" * 30),
]
TEXTS: Final = [
    *(
        '""',
        '"a"',
        '"N1"',
        '"\\u0000"',
        '"\\ud800"',
        '"\\ud83d\\ude00"',
        '"\\udc00\\ud800"',
        '"\u00e9"',
        '"e\u0301"',
        '"\\n"',
    ),
    *(
        '"@2013-01-01T05:00:00Z"',
        '"a#b"',
        '"\ufeff"',
        '"\U0001f600"',
        '"' + "x" * 5000 + '"',
        '"2013-01-01T05:00:00Z"',
        '"\t"',
        '"',
    ),
]
OTHERS: Final = [
    "null",
    "true",
    "false",
    "[]",
    "{}",
    "[null]",
    "[1,2]",
    '["a"]',
    '{"a":1}',
    '{"":1}',
    "[[[]]]",
    "nul",
    "",
    "\x00",
]
NAMES: Final = ["k", "n", "f", "t", "b", "l", "o", "at", "id", "", "K", "\\u006b", "k\\u0000", "é"]
COLUMNS: Final = {
    "k": str, "n": int, "f": float, "t": str, "b": bool, "l": pl.List(pl.Int64), "o": {"a": int, "b": str}, "at": int, "id": str,
}  # fmt: skip
CHAIN: Final = [
    Hop("raw", 0, 3, via="r", index=0, count=1),
    Hop("raw", 1, 2**62, via="r"),
    Hop("raw", 2, 0, via="r", index=2**32 - 1, count=2**32 - 1, rekeyed=True, timestamp_ms=2**63 - 1),
    Hop("raw", 0, 5, via="", keyless=True, topic_id="other", cluster="c"),
    Hop("mid", 0, 5, via="é", leader_epoch=-1, timestamp_ms=-1),
    Hop("legs", 0, 5, via="r", index=0),
    Hop("raw", 0, 7, via="headwater.redriven f 1 s", pass_through=True),
]


def object_of(fields: Iterable[tuple[str, str]]) -> str:
    return "".join(("{", ",".join(f'"{name}":{value}' for name, value in fields), "}"))


class Odd:
    """Draws odd records.

    Args:
        rng: The generator.
        enveloped: Most of them are in envelopes.
        protobuf: Most payloads are protobuf messages.
    """

    def __init__(self, rng: random.Random, *, enveloped: bool, protobuf: bool) -> None:
        self.rng = rng
        self._enveloped = enveloped
        self._protobuf = protobuf
        self._envelopes = corpus(rng)

    def number(self) -> str:
        rng = self.rng
        return (
            rng.choice(NUMBERS)
            if rng.random() < 0.5
            else str(rng.choice([rng.randint(-5, 5), rng.getrandbits(60), rng.random()]))
        )

    def value_of(self, depth: int = 0) -> str:
        rng = self.rng
        match rng.randrange(7 if depth < 3 else 5):
            case 0 | 1:
                return self.number()
            case 2 | 3:
                return rng.choice(TEXTS)
            case 4:
                return rng.choice(OTHERS)
            case 5:
                return f"[{','.join(self.value_of(depth + 1) for _ in range(rng.randrange(4)))}]"
        return self.object(rng.randrange(4), depth + 1)

    def object(self, fields: int, depth: int = 0) -> str:
        rng = self.rng
        return object_of((rng.choice(NAMES), self.value_of(depth)) for _ in range(fields))

    def usual(self) -> dict[str, Any]:
        """Fields of the types that are declared; some of their values are odd."""
        rng = self.rng
        return {
            "k": rng.choice(["a", "b", "c", "", "\0", "é", "k" * 300]),
            "n": rng.choice([0, 1, -1, 2**63 - 1, -(2**63), rng.randint(-9, 9), None]),
            "f": rng.choice([0.0, -0.0, 1.5, 1e308, -1e308, 5e-324, None, rng.random()]),
            "t": rng.choice(["", "x", "ab" * 700, None]),
            "b": rng.choice([True, False, None]),
            "l": rng.choice([[], [1], [2**63 - 1, 1], [None], None, list(range(40))]),
            "o": rng.choice([{}, {"a": 1}, {"a": None, "b": "x"}, None]),
            "at": rng.choice([*TIMES, None]) if rng.random() < 0.3 else NOW_MS + rng.randrange(60_000),
            "id": rng.choice(["1", "2", "3", "", None]),
        }

    def document(self) -> bytes:
        rng = self.rng
        match rng.randrange(14):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7:
                return json.dumps(self.usual()).encode()
            case 8 | 9:
                fields = {name: json.dumps(one) for name, one in self.usual().items()}
                fields[rng.choice(list(fields))] = self.value_of()
                return object_of(fields.items()).encode("utf-8", "surrogatepass")
            case 10:
                return self.object(rng.randrange(12)).encode("utf-8", "surrogatepass")
            case 11:
                return self.value_of().encode("utf-8", "surrogatepass")
            case 12:
                depth = rng.choice([3, 499, 500, 501, 2_000, 100_000])
                return (
                    b'{"k":"a","l":'
                    + rng.choice([b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth])
                    + b"}"
                )
        made = bytearray(json.dumps(self.usual()).encode())
        for _ in range(rng.randint(1, 4)):
            made[rng.randrange(len(made))] = rng.randrange(256)
        return bytes(made)

    def message(self) -> bytes:
        rng = self.rng
        leg: Any = Leg(
            tail=rng.choice(["a", "b", ""]), minutes=rng.choice([0, 1, 2**63 - 1, -(2**63)]), late=rng.random() < 0.5
        )
        if rng.random() < 0.5:
            leg.delay = rng.choice([0.0, math.nan, math.inf, -math.inf, 1e308])
        made = leg.SerializeToString()
        if rng.random() < 0.3:
            made += Every(int32=rng.randint(-9, 9), string=rng.choice(["", "é"]), rep_int64=[1, 2]).SerializeToString()
        return mutate(rng, made, rng.choice(self._envelopes)) if rng.random() < 0.3 else made

    def payload(self) -> bytes:
        rng = self.rng
        usual = rng.random() < 0.9
        made = self.message() if usual is self._protobuf else self.document()
        if rng.random() < 0.1:
            made = (
                rng.choice(
                    [b"\0" + struct.pack(">I", 7), b"\0" + struct.pack(">I", 7) + b"\0", b"\0\0\0\0\x07\x02\x00", b"\0"]
                )
                + made
            )
        return made

    def wrapped(self, key: bytes | None) -> bytes:
        rng = self.rng
        if rng.random() < 0.5:
            hops = (Hop("raw", 0, rng.randrange(10**6), via="r", index=0, count=1),) if rng.random() < 0.7 else ()
            number = rng.randrange(9)
            return encode(Envelope(self.payload(), hops, key=key, event_id=f"{number}", producer="p", sequence=number))
        try:
            made = encode(
                Envelope(
                    self.payload(),
                    tuple(rng.choices(CHAIN, k=rng.choice([0, 0, 1, 1, 2, 3, 31, 32]))),
                    key=key if rng.random() < 0.7 else rng.choice([None, b"", b"other"]),
                    event_id=rng.choice(["", "1", "2", "é", "x" * 2000]),
                    event_time_us=rng.choice(
                        [None, 0, -1, NOW_MS * 1000, 2**63 - 1, -(2**63), *(one * 1000 for one in (NOW_MS, NOW_MS + 5))]
                    ),
                    payload_type=rng.choice(["", "", "tests.Leg", "t"]),
                    content_type=rng.choice(["", "application/json", "\n"]),
                    destination=rng.choice(["", "", "legs", "out"]),
                    producer=rng.choice(["", "p", "é"]),
                    sequence=rng.choice([None, 0, 1, 2, 3, 2**63 - 1]),
                    last_sequence=rng.choice([None, None, 2, 5]),
                    producer_epoch=rng.choice([0, 1, 7]),
                ),
            )
        except ValueError:
            return b""
        return mutate(rng, made, rng.choice(self._envelopes)) if rng.random() < 0.2 else made

    def key(self) -> bytes | None:
        rng = self.rng
        return rng.choice(
            [None, b"", b"a", b"a", b"b", b"\0", b"\xff\xfe", b"k" * 70_000, "é".encode(), rng.randbytes(3)]
        )

    def value(self, key: bytes | None) -> bytes | None:
        rng = self.rng
        match rng.randrange(20):
            case 0:
                return rng.choice([None, b"", b"\0", b"{}", b"\x08", b"x" * 100_000, rng.randbytes(rng.randrange(60))])
            case 1:
                return rng.choice(self._envelopes)
            case 2:
                return self.payload() if self._enveloped else self.wrapped(key)
        return self.wrapped(key) if self._enveloped else self.payload()

    def headers(self) -> list[tuple[str, bytes | None]]:
        rng = self.rng
        if rng.random() < 0.4:
            return []
        odd = [None, b"", b"\xff", b"1", b"9" * 5000, b"-1", b"\xc2\xb2", b"2020-01-01T00:00:60Z", b"x" * 2000]
        names = [
            *(
                "",
                "h",
                "h",
                "\ufffd",
                "ce_id",
                "ce_time",
                "CE_Source",
                "traceparent",
                "content-type",
                RETRY_ATTEMPT,
                RETRY_DUE,
            ),
            *(
                "hw-dlq-topic",
                "hw-dlq-partition",
                "hw-root",
                "seq",
                "kafka_dlt-original-topic",
                "__connect.errors.topic",
            ),
        ]
        made: list[tuple[str, bytes | None]] = [(rng.choice(names), rng.choice(odd)) for _ in range(rng.randrange(6))]
        if rng.random() < 0.5:
            texts = {
                "specversion": "1.0",
                "id": rng.choice(["1", "2", "a#b"]),
                "source": "/s",
                "type": "t",
                "time": "2020-01-01T00:00:00Z",
            }
            made += [(f"ce_{name}", text.encode()) for name, text in texts.items() if rng.random() < 0.95]
        rng.shuffle(made)
        return made

    def record(self, offset: int, partition: int = 0) -> Record:
        key = self.key()
        times = TIMES if self.rng.random() < 0.2 else [NOW_MS + offset]
        return Record(
            TOPIC, partition, offset, key, self.value(key), self.rng.choice(times), tuple(self.headers()), TOPIC_ID
        )

"""Fuzzes the codec with damaged envelopes: it may raise only `EnvelopeError`.

    python -m tests.fuzz.codec [--executions 1000000] [--seed N]

It starts from valid envelopes and from the table of bad inputs, and changes bytes by a seeded generator. Half of
the values get a correct checksum again, so that the damage reaches the parser. A value that is read must be the same
after writing and reading it again, and must accept another hop.
"""

import argparse
import random
import time
from collections import Counter

import google_crc32c

from envelope import Envelope, EnvelopeError, Hop, append_hop, decode, encode
from envelope.codec import HEAD, SEAL_BYTES, SEAL_TAG, parse, varint
from envelope.deadletter import DeadLetterHeaders
from envelope.framing import strip_frame
from tests.unit.bad_inputs import BAD_INPUTS

MORE = Hop("fuzz", 1, 2, via="f", index=0, count=1)
PIECES = [b"", b"\0", b"\xff", b"\x08\x01", HEAD, SEAL_TAG, b"\x4a\x00", b"\x4a\x7f", b"\x0a\x01x", b"\x7f\xff"]
PIECES += [varint(n) for n in (1 << 31, (1 << 63) - 1, (1 << 64) - 1)] + [b"\xff" * 10, b"\x0b", b"\x0c"]


def corpus(rng: random.Random) -> list[bytes]:
    hops = [
        Hop(
            f"t{i}",
            i,
            1 << i * 5,
            via="r",
            index=i,
            count=i + 1,
            topic_id="id",
            leader_epoch=i,
            timestamp_ms=1 << i * 4,
        )
        for i in range(6)
    ]
    made = [
        encode(
            Envelope(
                rng.randbytes(rng.randint(0, 80)),
                tuple(hops[: rng.randint(0, 6)]),
                key=rng.choice([None, b"", b"key"]),
                event_id=rng.choice(["", "id"]),
                event_time_us=rng.choice([None, 0, -1, 1 << 60]),
                sequence=rng.choice([None, 7]),
                unknown=rng.choice([b"", b"\xc0\x3e\x07"]),
            )
        )
        for _ in range(40)
    ]
    return made + [value for bad in BAD_INPUTS for value in bad.values[:3] if value and len(value) < 2000]


def mutate(rng: random.Random, value: bytes, other: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, till = sorted((rng.randint(0, len(value)), rng.randint(0, len(value))))
        match rng.randrange(7):
            case 0 if value:
                at = min(at, len(value) - 1)
                value = value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :]
            case 1:
                value = value[:at] + rng.choice(PIECES) + value[at:]
            case 2:
                value = value[:at] + value[till:]
            case 3:
                value = value[:till] + value[at:]
            case 4:
                value = value[:at] + other[rng.randint(0, len(other)) :]
            case 5:
                value = value[:at] + rng.randbytes(min(till - at, 20)) + value[till:]
            case 6:
                value = value[:at]
    if rng.random() < 0.5 and len(value) > len(HEAD) + SEAL_BYTES:
        body = (HEAD + value[len(HEAD) :] if rng.random() < 0.9 else value)[:-SEAL_BYTES]
        value = body + SEAL_TAG + google_crc32c.value(body).to_bytes(4, "little")
    return value


def execute(value: bytes) -> str:
    """One execution; the reason, or `read`."""
    DeadLetterHeaders.read(
        [("hw-dlq-topic", value[:9]), ("hw-dlq-partition", value[9:10]), ("hw-dlq-offset", value[10:])]
    )
    try:
        envelope = decode(value)
    except EnvelopeError as error:
        try:
            parse(value)
        except EnvelopeError:
            pass
        return error.reason.value
    assert decode(encode(envelope)) == envelope
    if len(envelope.chain) < 32:
        assert decode(append_hop(strip_frame(value), MORE)) == envelope.with_hop(MORE)
    return "read"


def fuzz(executions: int, seed: int) -> Counter[str]:
    """Run; if the codec raises another error than `EnvelopeError`, the error contains the seed and the value."""
    rng = random.Random(seed)
    values = corpus(rng)
    outcomes: Counter[str] = Counter()
    for number in range(executions):
        value = mutate(rng, rng.choice(values), rng.choice(values))
        try:
            outcome = execute(value)
        except Exception as error:
            raise AssertionError(f"seed {seed}, execution {number}: {value!r}") from error
        outcomes[outcome] += 1
        if outcome == "read" and len(values) < 2000 and len(value) < 2000:
            values.append(value)
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    began = time.monotonic()
    for outcome, count in fuzz(arguments.executions, arguments.seed).most_common():
        print(f"{count:>10,}  {outcome}")
    print(
        f"{arguments.executions:,} executions in {time.monotonic() - began:.0f} s: nothing but EnvelopeError came out"
    )


if __name__ == "__main__":
    main()

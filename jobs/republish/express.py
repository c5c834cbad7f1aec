"""The fast path for the usual record: a sealed envelope without headers that is forwarded unchanged."""

from collections.abc import Callable
from typing import Final, TypeAlias

import google_crc32c
from google.protobuf.message import DecodeError

from envelope import Limits
from envelope import envelope_pb2 as pb
from envelope.codec import HEAD, SEAL_BYTES, SEAL_TAG
from envelope.hops import HopWriter
from envelope.limits import DEFAULT_LIMITS, MAX_OFFSET
from envelope.message import FORMAT

Express: TypeAlias = Callable[[bytes, bytes, int, int, int | None, HopWriter], bytes | None]
"""(value, key, offset, timestamp, leader epoch, hops) -> the value to produce; None to take the normal path."""

_HEAD_BYTES: Final = len(HEAD)


def express(known: set[str], most_bytes: int, limits: Limits = DEFAULT_LIMITS) -> Express:
    """Return a function that gives the result of `Processor.process` for `PASS`, three times as fast, or None.

    Any irregular record takes the normal path, which also finds the reason code. It is one function that calls only
    functions in C: at 150,000 records a second a Python call takes a fiftieth of the time.

    Args:
        known: Topics that were checked and that are neither read nor written here.
        most_bytes: Maximum size of an output's key and value, in bytes.
        limits: Limits of envelopes.
    """
    crc32c: Callable[[bytes], int] = google_crc32c.value
    extend: Callable[[int, bytes], int] = google_crc32c.extend
    parse = pb.Envelope.FromString
    most_hops, payload_bytes, message_bytes = limits.hops - 1, limits.payload_bytes, limits.message_bytes

    def passed_on(
        value: bytes, key: bytes, offset: int, timestamp_ms: int, leader_epoch: int | None, hops: HopWriter
    ) -> bytes | None:
        body, tail = value[:-SEAL_BYTES], value[-SEAL_BYTES:]
        if body[:_HEAD_BYTES] != HEAD or tail[:2] != SEAL_TAG or len(value) > message_bytes:
            return None
        crc = crc32c(body)
        if crc != int.from_bytes(tail[2:], "little"):
            return None
        try:
            message = parse(value)
        except DecodeError:
            return None
        if message.checksum != crc or message.format != FORMAT or message.key != key or message.destination:
            return None
        if len(message.payload) > payload_bytes:
            return None
        way = []
        for hop in message.chain:
            topic = hop.topic
            if topic not in known or hop.partition < 0 or not 0 <= hop.offset < MAX_OFFSET:
                return None
            way.append(topic)
        if len(way) > 1 and (len(way) > most_hops or len(set(way)) != len(way)):
            return None
        more = hops.write(offset, timestamp_ms, leader_epoch)
        if len(value) + len(more) + len(key) > most_bytes:
            return None
        return body + more + SEAL_TAG + extend(crc, more).to_bytes(4, "little")

    return passed_on

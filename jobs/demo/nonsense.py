"""Malformed records among the good ones. Each must become a dead letter with the right reason code."""

from dataclasses import dataclass
from typing import Final

from envelope import Envelope, Hop, Limits, Reason, encode
from jobs.demo.flow import LEGS, RAW
from jobs.demo.leg_pb2 import Leg


@dataclass(frozen=True, slots=True)
class Nonsense:
    """A record that must end in the dead-letter topic.

    Attributes:
        topic: Topic that it is produced to.
        value: Its value.
        reason: Expected reason code.
        key: Its key.
    """

    topic: str
    value: bytes | None
    reason: Reason
    key: bytes | None = b"N0NSENSE"


def in_raw() -> list[Nonsense]:
    """Records that the republisher must reject."""
    return [
        Nonsense(RAW, None, Reason.EMPTY),
        Nonsense(RAW, b"", Reason.EMPTY),
        Nonsense(RAW, b"\x00\x01\x02 not JSON", Reason.BAD_PAYLOAD),
        Nonsense(RAW, b'{"time_hour":"2013-01-01T10:00:00Z","carrier":"UA"', Reason.BAD_PAYLOAD),
        Nonsense(RAW, b'{"carrier":"UA","tailnum":"N14228"}', Reason.TRANSFORM_FAILED),
        Nonsense(RAW, b'["N14228",227]', Reason.TRANSFORM_FAILED),
        Nonsense(
            RAW,
            b'{"time_hour":"2013-01-01T10:00:00Z","carrier":"UA","tailnum":"N14228","dep_time":517,"dep_delay":"late",'
            b'"arr_time":830,"arr_delay":11,"air_time":227}',
            Reason.TRANSFORM_FAILED,
        ),
    ]


def in_legs() -> list[Nonsense]:
    """Records that the flow must reject."""
    good = encode(_envelope())
    return [
        Nonsense(LEGS, None, Reason.EMPTY),
        Nonsense(LEGS, b'{"tail":"N14228"}', Reason.NOT_AN_ENVELOPE),
        Nonsense(LEGS, good[:-9], Reason.TRUNCATED),
        Nonsense(LEGS, good[:9] + bytes([good[9] ^ 1]) + good[10:], Reason.CHECKSUM_MISMATCH),
        Nonsense(LEGS, encode(_envelope(destination="other.topic")), Reason.WRONG_DESTINATION),
        Nonsense(LEGS, encode(_envelope(payload_type="other.Type")), Reason.UNKNOWN_PAYLOAD_TYPE),
        Nonsense(LEGS, encode(_envelope(payload=b"\xff\xff")), Reason.BAD_PAYLOAD),
        Nonsense(LEGS, encode(_envelope(chain=(_hop(LEGS),))), Reason.CHAIN_LOOP),
        Nonsense(
            LEGS,
            encode(_envelope(chain=tuple(_hop(f"hop.{n}") for n in range(33))), Limits(hops=64)),
            Reason.TOO_MANY_HOPS,
        ),
        Nonsense(LEGS, encode(_envelope(Leg(tail="N14228", carrier="UA"))), Reason.DIVERTED),
        Nonsense(
            LEGS,
            encode(_envelope(Leg(tail="N14228", carrier="UA", event=Leg.EVENT_ARRIVED, air_minutes=-5))),
            Reason.DIVERTED,
        ),
        Nonsense(LEGS, encode(_envelope(Leg(carrier="UA", event=Leg.EVENT_CANCELLED))), Reason.NULL_KEY),
    ]


_ARRIVED: Final = Leg(tail="N14228", carrier="UA", event=Leg.EVENT_ARRIVED, air_minutes=227)


def _envelope(
    leg: Leg = _ARRIVED,
    *,
    payload: bytes = b"",
    chain: tuple[Hop, ...] = (),
    destination: str = "",
    payload_type: str = Leg.DESCRIPTOR.full_name,
) -> Envelope:
    return Envelope(
        payload=payload or leg.SerializeToString(),
        # Not of flights.raw: a root beyond its end is rejected before any other check.
        chain=chain or (_hop("nonsense.raw"),),
        payload_type=payload_type,
        destination=destination,
    )


def _hop(topic: str) -> Hop:
    # An offset that no run of the demo reaches, so that it is not the root of a real message.
    return Hop(topic, 0, 1 << 40, via="nonsense", index=0)

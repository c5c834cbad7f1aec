"""Timestamps of records as event times."""

from typing import Final

MAX_TIMESTAMP_MS: Final = (2**63 - 1) // 1000
"""The latest timestamp that fits into 64 bits in microseconds; its negative is the earliest."""


def micros_of(timestamp_ms: int) -> int:
    """Milliseconds as microseconds, clamped to 64 bits: a producer may write any timestamp."""
    return max(-MAX_TIMESTAMP_MS, min(timestamp_ms, MAX_TIMESTAMP_MS)) * 1000

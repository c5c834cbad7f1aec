"""A checksum inside a JSON object: `{...}` becomes `{...,"crc32c":"8f3a01bc"}`.

The value stays one readable JSON object, for `redis-cli` and for programs that ignore
the checksum. The checksum is a CRC32C (RFC 3720) of every byte before it.
"""

import google_crc32c

_TAIL = b',"crc32c":"'
_TAIL_BYTES = len(_TAIL) + 8 + 2


class DamagedError(ValueError):
    """A value differs from the one that `seal` returned."""


def seal(body: bytes) -> bytes:
    """Return the JSON object `body` (not an empty one) with its checksum as last member."""
    kept = body[:-1]
    return b'%b%b%08x"}' % (kept, _TAIL, google_crc32c.value(kept))


def unseal(value: bytes) -> bytes:
    """Return `value` itself after checking it; a reader ignores the member `crc32c`.

    Raises:
        DamagedError: It is not bytes, has no checksum, or a wrong one. The text says which and does not
            quote the value.
    """
    if not isinstance(value, bytes):
        raise DamagedError(f"the value is of type {type(value).__name__}, not bytes")
    if value[:1] != b"{" or value[-_TAIL_BYTES:-10] != _TAIL or value[-2:] != b'"}':
        raise DamagedError(
            f"{len(value)} bytes without a checksum at their end: truncated, or written by something else"
        )
    if b"%08x" % google_crc32c.value(value[:-_TAIL_BYTES]) != value[-10:-2]:
        raise DamagedError(f"{len(value)} bytes that do not match their checksum")
    return value

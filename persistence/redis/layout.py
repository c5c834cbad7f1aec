"""Names of the keys in Redis.

With the default prefix, for flow `fleet`, generation 1, stage `aircraft`, the state of key `N14228`:

| key | type | holds |
|---|---|---|
| `hw:{fleet:1}` | hash | `term`, `buckets`, `manifest` (JSON), `manifest_head` (term and batch of it) |
| `hw:{fleet:1:5}` | hash | `term`, `buckets` of bucket 5 |
| `hw:{fleet:1:5}:aircraft` | set | the keys that have a state in this bucket |
| `hw:{fleet:1:5}:aircraft:N14228` | hash | `head` ("version term batch"), `value` (the state record, JSON) |

A key's bucket is its CRC-32 (as of zlib) modulo the number of buckets. What is in braces decides about the
cluster slot, so a bucket lies on one node and one script can replace many of its states. Read a state with
`redis-cli HGETALL 'hw:{fleet:1:5}:aircraft:N14228'`; do not write one.

A bucket's hash is the fence: it is checked in the same script that writes. The set tells a state that was evicted, expired or deleted from one that never was.
"""

from dataclasses import dataclass
from zlib import crc32

from persistence.names import FlowRef, StageRef


@dataclass(frozen=True, slots=True)
class Layout:
    """Key names under one prefix."""

    prefix: str = "hw"

    def flow(self, flow: FlowRef) -> bytes:
        """The flow's hash."""
        return f"{self.prefix}:{{{flow.flow}:{flow.generation}}}".encode()

    def bucket(self, flow: FlowRef, bucket: int) -> bytes:
        """A bucket's hash."""
        return f"{self.prefix}:{{{flow.flow}:{flow.generation}:{bucket}}}".encode()

    def index(self, stage: StageRef, bucket: int) -> bytes:
        """The set of keys that have a state. A state's name is this, a colon, and its key."""
        return self.bucket(stage.flow_ref, bucket) + b":" + stage.stage.encode()


def bucket_of(key: bytes, buckets: int) -> int:
    """The bucket of a state's key."""
    return crc32(key) % buckets
